"""Tool calls between special tokens: begin NAME separator ARGUMENTS end. DeepSeek and newer Mistral models
write them so.
"""

# ruff: noqa: RUF001 (DeepSeek's markers are written with full-width bars)
from __future__ import annotations

from collections.abc import Sequence

from minisgl.server.parsers.base import Event, MarkerScanner, OutputParser, ToolArguments, ToolStart, Trimmer
from minisgl.server.parsers.tools import AnswerText, JsonListParser

_FENCE = "\n```json"
_MISTRAL = "[TOOL_CALLS]"


class MarkedCallParser:
    """Names and arguments between markers; the arguments are passed on as they come.

    end: None if a call ends where the next begins, or with the text. ignored: markers around the whole list.
    kind: a word in the place of the name, after which the name and a fenced block of arguments follow the
    separator (DeepSeek V3).
    """

    def __init__(
        self, begin: str, separator: str, end: str | None, ignored: Sequence[str] = (), kind: str = ""
    ):
        self._begin, self._separator, self._end = begin, separator, end
        self._ignored, self._kind = tuple(ignored), kind
        self.markers: Sequence[str] = tuple(m for m in (begin, separator, end, *ignored) if m)
        self._scanner = MarkerScanner()
        self._answer = AnswerText()
        self._state = "text"  # text, name, fenced_name, arguments
        self._name = ""
        self._arguments = Trimmer()
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Answer text and calls that a further piece makes certain."""
        events: list[Event] = []
        marker: str | None = ""
        while marker is not None:
            before, marker = self._scanner.split(text, self._expected())
            text = ""
            self._take(before, events)
            if marker is not None:
                self._turn(marker, events)
        return events

    def _expected(self) -> tuple[str, ...]:
        if self._state == "text":
            return (self._begin, *self._ignored)
        if self._state == "name":
            return (self._separator,)
        if self._state == "fenced_name":
            return (_FENCE,)
        return (self._end or self._begin,)

    def _take(self, text: str, events: list[Event]) -> None:
        if self._state == "text":
            events += self._answer.text(text)
        elif self._state == "arguments":
            piece = self._arguments.feed(text)
            if piece:
                events.append(ToolArguments(self._num_calls, piece))
        else:
            self._name += text

    def _turn(self, marker: str, events: list[Event]) -> None:
        if self._state == "text":
            self._answer.call()
            if marker == self._begin:
                self._state, self._name = "name", ""
        elif self._state == "name" and self._kind and self._name.strip() == self._kind:
            self._state, self._name = "fenced_name", ""
        elif self._state == "arguments":
            self._num_calls += 1
            self._state, self._name = ("text", "") if self._end else ("name", "")
        else:
            name = self._name.split("[CALL_ID]")[0].strip()
            events.append(ToolStart(self._num_calls, name))
            self._arguments = Trimmer(ends=" \t\r\n`" if self._state == "fenced_name" else " \t\r\n")
            self._state = "arguments"

    def finish(self) -> list[Event]:
        """What was held back; a call without a complete name is text."""
        rest = self._scanner.rest()
        events: list[Event] = []
        if self._state in ("text", "arguments"):
            self._take(rest, events)
        else:
            events += self._answer.text(self._begin + self._name + rest)
        return events + self._answer.rest()


def deepseek_parser() -> MarkedCallParser:
    """DeepSeek V3 (a kind, the name and a fenced block) and V3.1 (name and arguments)."""
    return MarkedCallParser(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        kind="function",
    )


class MistralParser:
    """[TOOL_CALLS] and then either a JSON list (up to 2024) or NAME[ARGS]{...}, once for each call."""

    markers: Sequence[str] = (_MISTRAL, "[ARGS]", "[CALL_ID]")

    def __init__(self) -> None:
        self._parser: OutputParser | None = None
        self._scanner = MarkerScanner()
        self._answer = AnswerText()
        self._begun = ""  # from the marker on, while the form is open

    def feed(self, text: str) -> list[Event]:
        """Answer text and calls that a further piece makes certain."""
        if self._parser is not None:
            return self._parser.feed(text)
        events: list[Event] = []
        if not self._begun:
            before, marker = self._scanner.split(text, (_MISTRAL,))
            events += self._answer.text(before)
            if marker is None:
                return events
            self._begun, text = marker, self._scanner.rest()
        self._begun += text
        body = self._begun[len(_MISTRAL) :].lstrip()
        if body:
            self._parser = (
                JsonListParser(_MISTRAL) if body[0] in "[{" else MarkedCallParser(_MISTRAL, "[ARGS]", None)
            )
            events += self._parser.feed(self._begun)
        return events

    def finish(self) -> list[Event]:
        """What was held back."""
        if self._parser is not None:
            return self._parser.finish()
        return self._answer.text(self._begun or self._scanner.rest()) + self._answer.rest()
