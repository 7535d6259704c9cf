"""An answer as a sequence of blocks, each opened, filled and closed: the form that the Anthropic and
Responses APIs stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from minisgl.server.chat_format import new_call_id
from minisgl.server.parsers import Event, Reasoning, Text, ToolArguments, ToolStart

Kind = Literal["text", "reasoning", "call"]
Change = tuple[Literal["open", "piece", "close"], "Block", str]


@dataclass
class Block:
    """One part of an answer. text: the answer, the reasoning, or a call's arguments. name and call_id: of a
    call.
    """

    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


class BlockSplitter:
    """Events in, changes of blocks out. with_reasoning: False drops the reasoning."""

    def __init__(self, with_reasoning: bool = True):
        self.blocks: list[Block] = []
        self._with_reasoning = with_reasoning
        self._open: Block | None = None

    def feed(self, events: Iterable[Event]) -> list[Change]:
        """What the events change, in order."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, ToolStart):
                self._begin(changes, "call", event.name)
            elif isinstance(event, Reasoning):
                if self._with_reasoning:
                    self._fill(changes, "reasoning", event.text)
            elif isinstance(event, Text):
                self._fill(changes, "text", event.text)
            elif isinstance(event, ToolArguments):
                self._fill(changes, "call", event.text)
        return changes

    def finish(self) -> list[Change]:
        """Close the last block. An answer without any gets an empty text."""
        changes: list[Change] = []
        if not self.blocks:
            self._begin(changes, "text")
        self._end(changes)
        return changes

    def _begin(self, changes: list[Change], kind: Kind, name: str = "") -> None:
        self._end(changes)
        self._open = Block(len(self.blocks), kind, name=name, call_id=new_call_id() if kind == "call" else "")
        self.blocks.append(self._open)
        changes.append(("open", self._open, ""))

    def _fill(self, changes: list[Change], kind: Kind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(changes, kind)
        assert self._open is not None
        self._open.text += text
        if changes and changes[-1][0] == "piece" and changes[-1][1] is self._open:
            text = changes.pop()[2] + text
        changes.append(("piece", self._open, text))

    def _end(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(("close", self._open, ""))
            self._open = None
