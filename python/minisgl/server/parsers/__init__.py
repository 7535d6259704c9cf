"""Parsers of model output, and the choice among them: by flag, or by the markers that a model's chat
template mentions.
"""

# ruff: noqa: RUF001 (DeepSeek's markers are written with full-width bars)
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from minisgl.server.parsers.base import (
    Event,
    OutputParser,
    PlainParser,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
)
from minisgl.server.parsers.harmony import HarmonyParser
from minisgl.server.parsers.marked import MistralParser, deepseek_parser
from minisgl.server.parsers.reasoning import ThinkParser, start_of
from minisgl.server.parsers.tools import HermesParser, JsonListParser

__all__ = [
    "ChainParser",
    "Event",
    "Formats",
    "OutputParser",
    "PlainParser",
    "Reasoning",
    "Text",
    "ToolArguments",
    "ToolStart",
    "chat_parser",
    "detect",
]


@dataclass(frozen=True)
class Formats:
    """How a model writes tool calls and reasoning; "none" for not at all. Names as in `ServerConfig`."""

    tools: str
    reasoning: str


_TEMPLATE_HINTS = (  # first match wins
    ("harmony", "<|channel|>"),
    ("deepseek", "<｜tool▁call"),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3", "<|python_tag|>"),
    ("llama3", '"parameters": '),
)


def detect(tool_parser: str, reasoning_parser: str, template: str) -> Formats:
    """Resolve "auto" by the chat template's text."""
    found = next((name for name, hint in _TEMPLATE_HINTS if hint in template), "none")
    tools = found if tool_parser == "auto" else tool_parser
    if reasoning_parser != "auto":
        return Formats(tools, reasoning_parser)
    if tools == "harmony":
        return Formats(tools, "harmony")
    return Formats(tools, "think" if "<think>" in template or "</think>" in template else "none")


class ChainParser:
    """Reasoning first; what is left goes to the tool parser."""

    def __init__(self, first: OutputParser, second: OutputParser):
        self._first, self._second = first, second
        self.markers: Sequence[str] = (*first.markers, *second.markers)

    def _pass_on(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self._second.feed(event.text) if isinstance(event, Text) else [event]
        return out

    def feed(self, text: str) -> list[Event]:
        """Events of both."""
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Event]:
        """What either held back."""
        return self._pass_on(self._first.finish()) + self._second.finish()


def chat_parser(formats: Formats, prompt: str, tool_names: Collection[str]) -> OutputParser:
    """A parser for one answer. prompt: as rendered; tool_names: empty where no tools were offered."""
    if "harmony" in (formats.tools, formats.reasoning):
        return HarmonyParser()
    tools = _tool_parser(formats.tools, tool_names) if tool_names else PlainParser()
    if formats.reasoning == "think":
        return ChainParser(ThinkParser(start_of(prompt)), tools)
    return tools


def _tool_parser(name: str, tool_names: Collection[str]) -> OutputParser:
    if name == "hermes":
        return HermesParser()
    if name == "llama3":
        return JsonListParser("<|python_tag|>", frozenset(tool_names))
    if name == "mistral":
        return MistralParser()
    if name == "deepseek":
        return deepseek_parser()
    return PlainParser()
