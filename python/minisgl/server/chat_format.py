"""How deltas of a generation look in OpenAI's chat format: fields of a chunk, or a whole message."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from minisgl.core import TokenLogprobs
from minisgl.server.generation import Delta
from minisgl.server.parsers import Event, Reasoning, Text, ToolArguments, ToolStart
from minisgl.text import Tokenizer


def new_call_id() -> str:
    """A fresh id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def delta_fields(events: Sequence[Event]) -> dict[str, Any]:
    """The `delta` of a chunk: equal kinds are joined, and a tool call has one entry, its id and name only at
    its start.
    """
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Text):
            fields["content"] = fields.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            text = fields.get("reasoning_content", "") + event.text
            fields["reasoning_content"] = fields["reasoning"] = text
        elif isinstance(event, ToolStart):
            calls[event.index] = {
                "index": event.index,
                "id": new_call_id(),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        elif isinstance(event, ToolArguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def logprob_content(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` object of a choice."""
    entries = []
    for item in logprobs:
        entry = _logprob_entry(tokenizer, item.token_id, item.logprob)
        entry["top_logprobs"] = [_logprob_entry(tokenizer, token, value) for token, value in item.top]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def _logprob_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = tokenizer.token_text(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}


class MessageBuilder:
    """Collects the deltas of one choice into a whole message."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.events += delta.events
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason

    def message(self) -> dict[str, Any]:
        """The `message` of a choice. content is null only beside tool calls."""
        fields = delta_fields(self.events)
        calls = fields.pop("tool_calls", None)
        content = fields.pop("content", None)
        message = {
            "role": "assistant",
            "content": content if content or calls else "",
            "refusal": None,
            **fields,
        }
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return message
