"""Servers to test against: one shared by most tests, and a way to start others with their own settings."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed")

import httpx

from minisgl.server.null_server import options_of

ROOT = pathlib.Path(__file__).parents[2]


class Server:
    """A running server process and a client for it. module and arguments: what to run with python -m."""

    def __init__(self, module: str, arguments: list[str], wait: bool = True, port: int = 0):
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        threading.Thread(target=self._read_log, daemon=True).start()
        self.port = port
        if wait:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line.startswith("READY"), f"the server did not start: {''.join(self.log)}"
            self.port = int(line.split()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log += iter(self.process.stderr.readline, "")

    def chat(self, text: str, **fields: object) -> httpx.Response:
        """A chat request whose answer is its text."""
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        """A plain completion."""
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def stream(self, path: str, body: dict[str, object]) -> list[dict]:
        """The chunks of a streamed answer; checks the framing and the end."""
        answer = self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_stream(answer.text)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        """Send a signal and wait for the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def closing(server: Server) -> Iterator[Server]:
    """Kill the server at the end, if it still runs."""
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def parse_stream(text: str) -> list[dict]:
    """Payloads of a stream that must end with [DONE]."""
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], frames[-3:]
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with one token a byte, and the options of an engine that fits it."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    options_of(folder)
    return folder


@pytest.fixture(scope="session")
def start_server(tokenizer_folder: str) -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """A context manager that runs a server with settings of its own."""

    @contextlib.contextmanager
    def start(wait: bool = True, **settings: dict[str, object]) -> Iterator[Server]:
        arguments = [tokenizer_folder, json.dumps(settings)]
        port = int(settings.get("server", {}).get("port", 0))  # pyright: ignore
        with closing(Server("minisgl.server.null_server", arguments, wait, port)) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def server(start_server) -> Iterator[Server]:
    """The server that most tests share."""
    with start_server(server={"tool_parser": "hermes", "reasoning_parser": "think"}) as running:
        yield running


@pytest.fixture(scope="session")
def slow(start_server) -> Iterator[Server]:
    """Slow enough that an answer can be stopped: 20 ms a token."""
    with start_server(server={"reasoning_parser": "think"}, null={"step_seconds": 0.02}) as running:
        yield running


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def start_demo() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """A context manager that serves the bundled demo model with the real engine; options are EngineConfig fields."""

    def start(**engine: object) -> contextlib.AbstractContextManager[Server]:
        return closing(Server("tests.server.serve_demo", [json.dumps({"engine": engine})]))

    return start


@pytest.fixture(scope="session")
def demo(start_demo) -> Iterator[Server]:
    """The demo model with its defaults."""
    with start_demo() as running:
        yield running
