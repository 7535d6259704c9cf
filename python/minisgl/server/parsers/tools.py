"""Tool calls written as JSON objects: between tags (Hermes, Qwen3), bare or after a marker (Llama 3), in
lists (Mistral).

Text that only looked like a call is given back as text. Cut off in the middle, a call keeps what was certain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minisgl.server.parsers.base import Event, MarkerScanner, Text, Trimmer
from minisgl.server.parsers.json_call import JsonCall


class AnswerText:
    """The text around calls: white space next to a call is layout of the format, not of the answer."""

    def __init__(self) -> None:
        self._trimmer = Trimmer(leading=False)

    def text(self, text: str) -> list[Event]:
        """Events for more text."""
        piece = self._trimmer.feed(text)
        return [Text(piece)] if piece else []

    def call(self) -> None:
        """A call stands here: drop the white space on both sides of it."""
        self._trimmer = Trimmer(leading=True)

    def rest(self) -> list[Event]:
        """Events for white space at the very end."""
        rest = self._trimmer.rest()
        return [Text(rest)] if rest else []


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times."""

    open, close = "<tool_call>", "</tool_call>"
    markers: Sequence[str] = (open, close)

    def __init__(self) -> None:
        self._scanner = MarkerScanner()
        self._answer = AnswerText()
        self._call: JsonCall | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Answer text and calls that a further piece makes certain."""
        events: list[Event] = []
        while True:
            if self._call is None:
                before, marker = self._scanner.split(text, (self.open,))
                events += self._answer.text(before)
                if marker is None:
                    return events
                self._call = JsonCall(self._num_calls)
                text = self._scanner.rest()
            if not (self._call.done or self._call.failed):
                new, text = self._call.feed(text)
                events += new
            if self._call.failed:
                events += self._give_back(self._call)
            elif not self._call.done:
                return events
            else:
                text = self._skip_to_close(text)
                if self._call is not None:
                    return events

    def _skip_to_close(self, text: str) -> str:
        _, marker = self._scanner.split(text, (self.close,))
        if marker is None:
            return ""
        self._call = None
        self._num_calls += 1
        self._answer.call()
        return self._scanner.rest()

    def _give_back(self, call: JsonCall) -> list[Event]:
        """A failed call is text; one that had begun stays a call, cut short."""
        self._call = None
        if call.started:
            self._num_calls += 1
            return []
        return self._answer.text(self.open + call.raw)

    def finish(self) -> list[Event]:
        """What was held back, and an unfinished call as text."""
        events: list[Event] = []
        if self._call is None:
            events += self._answer.text(self._scanner.rest())
        elif not self._call.started:
            events += self._answer.text(self.open + self._call.raw)
        return events + self._answer.rest()


class JsonListParser:
    """Calls as JSON objects, alone or in a list: Llama 3, older Mistral, and answers forced by tool_choice.

    marker: what announces calls; without it they are expected at the very beginning. names: the functions
    there are, needed where plain JSON could also be the answer.
    """

    def __init__(self, marker: str = "", names: Collection[str] | None = None):
        self.markers: Sequence[str] = (marker,) if marker else ()
        self._names = names
        self._scanner = MarkerScanner()
        self._answer = AnswerText()
        self._state = "text"  # text, between (calls), call, plain (nothing but text comes any more)
        self._has_text = False  # whether the answer began with something that is no call
        self._lead = ""  # white space and brackets before the first call
        self._call: JsonCall | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Answer text and calls that a further piece makes certain."""
        events: list[Event] = []
        if self._state == "text":
            text = self._find_start(text, events)
        while text:
            if self._state == "plain":
                return events + self._answer.text(text)
            if self._state == "text":
                return events
            if self._call is None:
                text = self._skip_between(text)
            else:
                new, text = self._call.feed(text)
                events += new
                if self._call.failed:
                    text = self._fail(self._call) + text
                elif self._call.done:
                    self._call, self._lead = None, ""
                    self._num_calls += 1
        return events

    def _find_start(self, text: str, events: list[Event]) -> str:
        if not self.markers:
            self._state = "between"
            return text
        before, marker = self._scanner.split(text, self.markers)
        if not self._has_text and before.lstrip().startswith(("{", "[")) and self._names is not None:
            self._state = "between"  # Llama 3 often leaves the marker out
            return before + (marker or "") + self._scanner.rest()
        self._has_text = self._has_text or bool(before.strip())
        events += self._answer.text(before)
        if marker is None:
            return ""
        self._answer.call()
        self._state = "between"
        return self._scanner.rest()

    def _skip_between(self, text: str) -> str:
        for at, char in enumerate(text):
            if char == "{":
                self._call = JsonCall(self._num_calls, self._names, strict=True)
                return text[at:]
            self._lead += char
            if not (char.isspace() or char in "[],;"):
                lead, self._lead = self._lead, ""
                self._state = "plain"
                return lead + text[at + 1 :]
        return ""

    def _fail(self, call: JsonCall) -> str:
        """Text to go on with after an object that is no call."""
        self._call, self._state = None, "plain"
        if call.started:
            self._num_calls += 1
            return ""
        lead, self._lead = self._lead, ""
        return lead + call.raw

    def finish(self) -> list[Event]:
        """What was held back, and an unfinished call as text."""
        events: list[Event] = []
        if self._call is not None and not self._call.started:
            events += self._answer.text(self._lead + self._call.raw)
        elif self._num_calls == 0 and self._call is None:
            events += self._answer.text(self._lead + self._scanner.rest())
        return events + self._answer.rest()
