"""Answers forced by tool_choice: a grammar made the text nothing but arguments, so there are no markers to
look for.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.server.parsers.base import Event, ToolArguments, ToolStart


class NamedCallParser:
    """The whole text is the arguments of one function."""

    markers: Sequence[str] = ()

    def __init__(self, name: str):
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Event]:
        """The call begins with the first character."""
        if not text:
            return []
        events: list[Event] = [] if self._started else [ToolStart(0, self._name)]
        self._started = True
        return [*events, ToolArguments(0, text)]

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []
