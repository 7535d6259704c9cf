"""What a chat answer is made of, and the contract of the machines that find it in a model's text.

A parser is fed text as it comes and says what it has become certain of. Fed in any cut, it says the same in
the end: that is the property its tests check, and why a streamed answer and a whole one cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minisgl.text import undecided_tail


@dataclass(frozen=True)
class Text:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """Tool call number `index` begins; its name is complete."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """A piece of the JSON text of a tool call's arguments."""

    index: int
    text: str


Event = Text | Reasoning | ToolStart | ToolArguments


class OutputParser(Protocol):
    """Text in, events out. `markers`: special tokens that must stay in the text for this parser to see them."""

    markers: Sequence[str]

    def feed(self, text: str) -> list[Event]:
        """What a further piece of text makes certain."""
        ...

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        ...


class PlainParser:
    """No markers: everything is the answer."""

    markers: Sequence[str] = ()

    def feed(self, text: str) -> list[Event]:
        """The text itself."""
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []


class MarkerScanner:
    """Splits a stream at markers, holding back what may become one. No marker may be the start of another."""

    def __init__(self) -> None:
        self._held = ""

    def split(self, text: str, markers: Sequence[str]) -> tuple[str, str | None]:
        """Take in text; return what precedes the first of the markers, and that marker. The rest stays
        inside.

        Call again with "" to go on with the rest, perhaps with other markers.
        """
        text, self._held = self._held + text, ""
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._held = text[at + len(marker) :]
            return text[:at], marker
        keep = len(text) - undecided_tail(text, markers)
        self._held = text[keep:]
        return text[:keep], None

    def rest(self) -> str:
        """What is held back, given up."""
        rest, self._held = self._held, ""
        return rest


class Trimmer:
    """Passes text on without the white space at its beginning and at its end; white space inside stays.

    leading: whether to strip at the beginning. ends: characters that are held back until something else
    follows them.
    """

    def __init__(self, leading: bool = True, ends: str = " \t\r\n"):
        self._strip = leading
        self._ends = ends
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain to stay."""
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        text = self._held + text
        kept = text.rstrip(self._ends)
        self._held = text[len(kept) :]
        return kept

    def rest(self) -> str:
        """The end that was held back, for when it turns out to belong to the text after all."""
        rest, self._held = self._held, ""
        return rest
