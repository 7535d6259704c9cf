"""Reasoning between <think> and </think>, as Qwen3, DeepSeek-R1, GLM and many others write it.

Whether a model is already thinking when it begins is read off the rendered prompt, whose template may have
opened or closed the block; what the client asked for is no evidence, because not every template listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from minisgl.server.parsers.base import Event, MarkerScanner, Reasoning, Text, Trimmer

OPEN, CLOSE = "<think>", "</think>"
Start = Literal["reasoning", "content", "either"]


def start_of(prompt: str) -> Start:
    """Where an answer to this prompt begins: inside an open block, after a closed one, or wherever the model
    likes.
    """
    end = prompt[-256:].rstrip()
    if end.endswith(OPEN):
        return "reasoning"
    return "content" if end.endswith(CLOSE) else "either"


class ThinkParser:
    """Splits off reasoning; white space around the markers belongs to neither part."""

    markers: Sequence[str] = (OPEN, CLOSE)

    def __init__(self, start: Start = "either"):
        self._state = start
        self._scanner = MarkerScanner()
        self._reasoning = Trimmer()
        self._content = Trimmer(leading=start == "content", ends="")
        self._lead = ""  # white space before it is known whether the answer begins with a marker

    def feed(self, text: str) -> list[Event]:
        """Reasoning and answer text that a further piece makes certain."""
        events: list[Event] = []
        if self._state == "either":
            text = self._decide(text)
        if self._state == "reasoning":
            before, marker = self._scanner.split(text, (CLOSE,))
            self._add(events, Reasoning(self._reasoning.feed(before)))
            if marker is None:
                return events
            self._state, text = "content", self._scanner.rest()
            self._content = Trimmer(ends="")
        if self._state == "content":
            self._add(events, Text(self._content.feed(text)))
        return events

    def _decide(self, text: str) -> str:
        """Leave "either" as soon as the text so far cannot, or does, begin with the open marker."""
        text = self._lead + text
        self._lead = ""
        begin = text.lstrip()
        if begin.startswith(OPEN):
            self._state = "reasoning"
            return begin[len(OPEN) :]
        if OPEN.startswith(begin):
            self._lead = text
            return ""
        self._state = "content"
        return text

    def finish(self) -> list[Event]:
        """What was held back: half a marker, or white space that nothing followed."""
        if self._state == "reasoning":
            tail = self._reasoning.feed(self._scanner.rest())
            return [Reasoning(tail)] if tail else []
        lead, self._lead = self._lead, ""
        return [Text(lead)] if lead else []

    @staticmethod
    def _add(events: list[Event], event: Text | Reasoning) -> None:
        if event.text:
            events.append(event)
