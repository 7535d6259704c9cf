"""A chat in the terminal, against any OpenAI-compatible server: streaming, history, a few commands.

Enter sends, Esc then Enter (or Alt+Enter) begins a new line. Ctrl-C stops an answer, or clears the line; Ctrl-D leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from minisgl.server.bench_client import HttpStream

try:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History
    from prompt_toolkit.key_binding import KeyBindings
except ImportError as error:
    raise ImportError("the shell needs more packages: pip install 'minisgl[server]'") from error

HELP = """\
/reset         forget the conversation      /system TEXT   set the system message (no TEXT: drop it)
/stats         numbers of the server        /exit          leave (or Ctrl-D)
Esc Enter      a new line                   Ctrl-C         stop the answer"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def default_history() -> History:
    """Earlier input, kept in the user's state folder."""
    folder = os.path.expanduser(os.environ.get("XDG_STATE_HOME", "~/.local/state") + "/minisgl")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return FileHistory(f"{folder}/history")


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Shell:
    """One conversation. write: where text goes (default: the terminal). session: a prompt_toolkit session."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        write: Callable[[str], None] | None = None,
        session: PromptSession[str] | None = None,
    ):
        self._url, self._api_key = url, api_key
        self._write = write or (lambda text: print(text, end="", flush=True))
        self._session = session
        self._system = ""
        self.messages: list[dict[str, str]] = []

    async def run(self) -> int:
        """Talk until the user leaves; returns the exit code."""
        session = self._session or PromptSession(history=default_history())
        self._write(f"{HELP}\n\n")
        while True:
            try:
                text = await session.prompt_async("> ", multiline=True, key_bindings=_keys())
            except KeyboardInterrupt:
                continue
            except EOFError:
                return 0
            if text.strip() == "/exit":
                return 0
            if text.strip():
                await self.handle(text.strip())

    async def handle(self, text: str) -> None:
        """Run a command or answer a message; whatever fails is told and does not end the shell."""
        try:
            if text.startswith("/"):
                await self._command(text)
            else:
                await self._answer(text)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self._write(f"\nerror: {error}\n")

    async def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self.messages.clear()
            self._write("The conversation is forgotten.\n")
        elif name == "/system":
            self._system = rest.strip()
            self._write(
                "The system message is set.\n" if self._system else "There is no system message now.\n"
            )
        elif name == "/stats":
            stream = await HttpStream.open(self._url, "/live/now", api_key=self._api_key)
            now = json.loads(await stream.read())
            for key, value in sorted(now.get("stats", {}).items()):
                self._write(f"{key:24}{value:14.0f}\n")
        else:
            self._write(f"{HELP}\n")

    async def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        task = asyncio.ensure_future(self._stream())
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not in the main thread, or on Windows
            loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            self._write(f"\n{_DIM}stopped{_PLAIN}\n")
        finally:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)

    async def _stream(self) -> None:
        began, said, thinking, tokens = time.perf_counter(), "", False, 0
        try:
            async for chunk in self._chunks():
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk["choices"]:
                    thought, piece = choice["delta"].get("reasoning_content"), choice["delta"].get("content")
                    if thought:
                        self._write(thought if thinking else f"{_DIM}{thought}")
                        thinking = True
                    if piece:
                        self._write(f"{_PLAIN}\n{piece}" if thinking else piece)
                        thinking = False
                        said += piece
        finally:
            self._write(_PLAIN if thinking else "")
            self.messages.append({"role": "assistant", "content": said})
        seconds = time.perf_counter() - began
        self._write(f"\n{_DIM}{tokens} tokens, {tokens / seconds:.1f} a second{_PLAIN}\n")

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"messages": system + self.messages, "stream": True, "stream_options": {"include_usage": True}}
        stream = await HttpStream.open(self._url, "/v1/chat/completions", body, self._api_key)
        try:
            if stream.status != 200:
                raise ValueError(json.loads(await stream.read())["error"]["message"])
            async for piece in stream.chunks():
                for line in piece.split(b"\n"):
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise ValueError(chunk["error"]["message"])
                        yield chunk
        finally:
            stream.close()
