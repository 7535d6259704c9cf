"""A server for clients that nobody here wrote. Runs in an environment without minisgl: the server's Python is named by
MINISGL_SERVER_PYTHON (default: the project's .venv), and everything is asked over HTTP."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = os.environ.get("MINISGL_SERVER_PYTHON", str(ROOT / ".venv/bin/python"))


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a server on the stand-in engine, which says the last message back."""
    settings = {"server": {"tool_parser": "hermes", "reasoning_parser": "think", "api_key": "secret"}}
    command = [
        PYTHON,
        "-m",
        "minisgl.server.null_server",
        str(tmp_path_factory.mktemp("model")),
        json.dumps(settings),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("READY"), "the server did not start"
    yield f"http://127.0.0.1:{int(line.split()[1])}"
    process.terminate()
    assert process.wait(30) == 0, "the server was well to the end"
