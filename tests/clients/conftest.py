"""Servers for clients that nobody here wrote. Runs in an environment without minisgl: the server's Python is named by
MINISGL_SERVER_PYTHON (default: the project's .venv), and everything is asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = os.environ.get("MINISGL_SERVER_PYTHON", str(ROOT / ".venv/bin/python"))


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[str]:
    """Base address of a server that prints READY and its port; it must end well at the end."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}"}
    command = [PYTHON, "-m", module, *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("READY"), "the server did not start"
        yield f"http://127.0.0.1:{int(line.split()[1])}"
        process.terminate()
        assert process.wait(30) == 0, "the server was well to the end"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a server on the stand-in engine, which says the last message back."""
    settings = {"server": {"tool_parser": "hermes", "reasoning_parser": "think", "api_key": "secret"}}
    folder = str(tmp_path_factory.mktemp("model"))
    with running("minisgl.server.null_server", folder, json.dumps(settings)) as address:
        yield address


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """Base address of a server on the bundled demo model."""
    with running("tests.server.serve_demo", "{}") as address:
        yield address
