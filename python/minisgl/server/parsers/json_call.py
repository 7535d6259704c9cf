"""Reads one tool call written as a JSON object while it is being written: {"name": "f", "arguments": {...}}.

Several families write calls so. The arguments are passed on as the model wrote them, character for
character, because clients concatenate the fragments and parse the whole; nothing is repaired.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from minisgl.server.parsers.base import Event, ToolArguments, ToolStart

_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCall:
    """A machine over the characters of one object.

    names: functions that may be called; another name makes it no call. None takes any. strict: an object
    without arguments is no call either (for formats where a plain JSON answer looks like the beginning of a
    call).
    """

    def __init__(self, index: int, names: Collection[str] | None = None, strict: bool = False):
        self.index = index
        self.done = False  # the object is complete and was a call
        self.failed = False  # it is no call; `raw` is all that was read
        self.raw = ""
        self.started = False
        self._names = names
        self._strict = strict
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # the key whose value is being read
        self._token = ""  # the key or value read so far
        self._name: str | None = None
        self._kept: str | None = None  # arguments that were not given out while they were read
        self._sent = 0  # characters of the value being read that were given out

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Events, and the text after the end of the object (or after the failure)."""
        events: list[Event] = []
        for at, char in enumerate(text):
            self.raw += char
            self._step(char, events)
            if self.done or self.failed:
                return events, text[at + 1 :]
        self._send_open_arguments(events)
        return events, ""

    def _step(self, char: str, events: list[Event]) -> None:
        if self._in_string:
            self._token += char
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif self._depth == 0:
            self._open(char)
        elif (self._depth == 1 and char in ":,}") or char.isspace():
            self._punctuate(char, events)
        else:
            self._depth += (char in "{[") - (char in "}]")
            self._in_string = char == '"'
            self._token += char
            self.failed = self._depth == 0  # a "]" that closes the object

    def _open(self, char: str) -> None:
        if char == "{":
            self._depth = 1
        elif not char.isspace():
            self.failed = True

    def _punctuate(self, char: str, events: list[Event]) -> None:
        if char.isspace():
            if self._depth > 1:
                self._token += char
        elif char == ":":
            self._key, self._token = self._string(self._token), ""
        else:
            if self._key is not None:
                self._end_value(events)
            if char == "}" and not self.failed:
                self._close(events)

    def _string(self, token: str) -> str | None:
        try:
            value = json.loads(token)
        except ValueError:
            value = None
        self.failed = self.failed or not isinstance(value, str)
        return value if isinstance(value, str) else None

    def _end_value(self, events: list[Event]) -> None:
        if self._key == "name":
            self._name = self._string(self._token)
            self.failed = self.failed or (self._names is not None and self._name not in self._names)
        elif self._key in _ARGUMENT_KEYS:
            self._send_open_arguments(events)
            self._kept = None if self._sent else self._token
        self._key, self._token, self._sent = None, "", 0

    def _send_open_arguments(self, events: list[Event]) -> None:
        """Give out the arguments read so far, if it is certain that they are an object of a named call."""
        if self._key not in _ARGUMENT_KEYS or self._name is None or not self._token.startswith("{"):
            return
        if not self.started:
            self.started = True
            events.append(ToolStart(self.index, self._name))
        if len(self._token) > self._sent:
            events.append(ToolArguments(self.index, self._token[self._sent :]))
            self._sent = len(self._token)

    def _close(self, events: list[Event]) -> None:
        if self._name is None or (self._strict and not self.started and self._kept is None):
            self.failed = True
            return
        self.done = True
        if self.started:
            return
        self.started = True
        arguments = "{}" if self._kept in (None, "", "null") else self._kept
        if arguments.startswith('"'):  # some models write the arguments as a string of JSON
            arguments = self._string(arguments) or "{}"
        events += [ToolStart(self.index, self._name), ToolArguments(self.index, arguments)]
