"""The chat in the terminal: answers, commands, errors, and keys, driven through a pipe instead of a keyboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import pty
import select
import signal
import sys
import threading
import time

import psutil
import pytest

from minisgl.server.shell import Shell

prompt_toolkit = pytest.importorskip("prompt_toolkit")
from prompt_toolkit import PromptSession  # noqa: E402
from prompt_toolkit.input import create_pipe_input  # noqa: E402
from prompt_toolkit.output import DummyOutput  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def shell(server):
    """A shell and all it wrote."""
    out: list[str] = []
    return Shell(server.url, write=out.append), out


def test_answers_stream_and_are_remembered(shell):
    talk, out = shell
    asyncio.run(talk.handle("hello there"))
    asyncio.run(talk.handle("<think>hm</think>yes"))
    text = "".join(out)
    assert "hello there" in text
    assert "\x1b[2mhm" in text, "thinking is dimmed"
    assert "tokens" in text
    assert [m["content"] for m in talk.messages] == [
        "hello there",
        "hello there",
        "<think>hm</think>yes",
        "yes",
    ]


def test_commands(shell):
    talk, out = shell
    asyncio.run(talk.handle("one"))
    asyncio.run(talk.handle("/reset"))
    assert talk.messages == []
    asyncio.run(talk.handle("/system be brief"))
    asyncio.run(talk.handle("/stats"))
    asyncio.run(talk.handle("/what"))
    text = "".join(out)
    assert "generated_tokens" in text
    assert "/reset" in text.split("generated_tokens")[1], "an unknown command shows the help"


def test_errors_do_not_end_the_shell(shell):
    talk, out = shell
    asyncio.run(talk.handle("x" * 9000))
    assert "maximum context length" in "".join(out)
    lost = Shell("http://127.0.0.1:1", write=out.append)
    asyncio.run(lost.handle("hello"))
    assert "error:" in out[-1]


def run_with_keys(server, keys: str) -> tuple[int, list[dict[str, str]], str]:
    out: list[str] = []
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        talk = Shell(server.url, write=out.append, session=PromptSession(input=pipe, output=DummyOutput()))
        code = asyncio.run(asyncio.wait_for(talk.run(), 20))
    return code, talk.messages, "".join(out)


def test_keys_enter_newline_and_leaving(server):
    code, messages, _ = run_with_keys(server, "one\r" + "two\x1b\rlines\r" + "\x04")
    assert code == 0
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one", "two\nlines"]
    assert run_with_keys(server, "/exit\r")[0] == 0


def test_ctrl_c_at_the_prompt_only_clears_the_line(server):
    code, messages, _ = run_with_keys(server, "half a line\x03" + "whole\r" + "\x04")
    assert code == 0
    assert messages[0]["content"] == "whole"


def test_ctrl_c_stops_an_answer(slow):
    out: list[str] = []
    talk = Shell(slow.url, write=out.append)
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    asyncio.run(talk.handle("a long answer " * 20))
    assert "stopped" in out[-1]
    assert 0 < len(talk.messages[1]["content"]) < 150
    asyncio.run(talk.handle("ok"))
    assert talk.messages[-1]["content"] == "ok"


class Terminal:
    """`minisgl chat demo`, a server of its own included, at a terminal."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
        command = [sys.executable, "-m", "minisgl", "chat", "demo", "--device", "cpu"]
        self._ours, theirs = pty.openpty()
        self.process = psutil.Popen(
            command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def reads(self, words: str, seconds: float = 60) -> bool:
        """Whether the words appear in time."""
        end = time.monotonic() + seconds
        while words not in self.text and time.monotonic() < end:
            if select.select([self._ours], [], [], 0.2)[0]:
                piece = os.read(self._ours, 1 << 16).decode(errors="replace")
                self.text += piece
                if "\x1b[6n" in piece:  # prompt_toolkit asks where the cursor is
                    self.type("\x1b[1;1R")
        return words in self.text

    def exit_code(self) -> int | None:
        """Ctrl-D until it leaves: between two prompts nobody reads the keys."""
        for _ in range(30):
            with contextlib.suppress(OSError):  # the terminal is gone once nobody has it open
                self.type("\x04")
                self.reads("\0", seconds=2)
            if self.process.poll() is not None:
                break
        return self.process.poll()


@pytest.mark.parametrize("way", ["ctrl-d", "killed"])
def test_the_command_leaves_nothing_behind(way):
    terminal, server = Terminal(), []
    try:
        assert terminal.reads("leave (or Ctrl-D)"), terminal.text
        server = terminal.process.children(recursive=True)
        assert len(server) >= 2
        if way == "ctrl-d":
            terminal.type("Hello there\r")
            assert terminal.reads("a second"), terminal.text
            assert terminal.exit_code() == 0
        else:
            terminal.process.kill()
            terminal.process.wait(5)
        assert not [p for p in psutil.wait_procs(server, timeout=30)[1] if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        for process in filter(psutil.Process.is_running, [*server, terminal.process]):
            process.kill()
