"""The harmony format of gpt-oss: messages in channels. analysis is reasoning, final is the answer,
commentary calls functions.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{…}

The token that ends a message of the last kind ends the request, too, so the text stops inside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minisgl.server.parsers.base import Event, MarkerScanner, Reasoning, Text, ToolArguments, ToolStart

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser:
    """Header and body in turn; the header says what the body is."""

    markers: Sequence[str] = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def __init__(self) -> None:
        self._scanner = MarkerScanner()
        self._header = ""
        self._state = "begin"  # begin (no marker seen yet), header, body
        self._num_calls = 0
        self._kind = "final"

    def feed(self, text: str) -> list[Event]:
        """Reasoning, answer text and calls that a further piece makes certain."""
        events: list[Event] = []
        marker: str | None = ""
        while marker is not None:
            expected = (_START, _CHANNEL, *_ENDS) if self._state != "header" else (_MESSAGE, *_ENDS)
            before, marker = self._scanner.split(text, expected)
            text = ""
            if self._state == "header":
                self._header += before
            elif before:
                self._say(before, events)
            if marker is not None:
                self._turn(marker, events)
        return events

    def _turn(self, marker: str, events: list[Event]) -> None:
        if marker == _MESSAGE:
            self._open_body(events)
        elif marker in _ENDS:
            self._num_calls += self._state == "body" and self._kind == "call"
            self._state, self._header, self._kind = "header", "", "final"
        else:
            self._state, self._header = "header", ""

    def _open_body(self, events: list[Event]) -> None:
        self._state = "body"
        recipient = _RECIPIENT.search(self._header)
        if recipient is not None:
            self._kind = "call"
            events.append(ToolStart(self._num_calls, recipient[1]))
        elif "analysis" in self._header:
            self._kind = "analysis"
        else:
            self._kind = "final"  # also commentary without a recipient: words to the user before a call

    def _say(self, text: str, events: list[Event]) -> None:
        if self._kind == "call":
            events.append(ToolArguments(self._num_calls, text))
        elif self._kind == "analysis":
            events.append(Reasoning(text))
        else:
            events.append(Text(text))

    def finish(self) -> list[Event]:
        """The end of an open body; an unfinished header says nothing to anybody."""
        events: list[Event] = []
        rest = self._scanner.rest()
        if rest and self._state != "header":
            self._say(rest, events)
        return events
