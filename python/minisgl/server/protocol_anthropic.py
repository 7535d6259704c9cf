"""Bodies of Anthropic's Messages API, and their translation into a chat request."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from minisgl.server.errors import bad_request
from minisgl.server.protocol import Body, ChatCompletionRequest, chat_request


class AnthropicBlock(Body):
    """One block of content; which fields count depends on type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None


class AnthropicMessage(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[AnthropicBlock]


class AnthropicTool(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(Body):
    """Whether the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Body):
    """Whether to think first, and to show it."""

    type: str


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[AnthropicBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the client asked for thinking blocks; most read only the first block and expect text
        there.
        """
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def to_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """The same request in OpenAI's terms. ApiError 400 for content that is not text."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _plain(body.system)})
    for message in body.messages:
        messages += _messages_of(message)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "chat_template_kwargs": {"enable_thinking": body.shows_thinking},
    }
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if isinstance(body, MessagesRequest):
        fields |= {
            name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")
        }
        fields["stop"] = body.stop_sequences
    return chat_request(fields)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice of type tool needs a name", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _plain(content: str | list[AnthropicBlock]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise bad_request(f"system has a block of type {block.type!r}; use text", "system")
    return "\n".join(block.text or "" for block in content)


def _messages_of(message: AnthropicMessage) -> list[dict[str, Any]]:
    """One turn as chat messages: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            function = {
                "name": block.name or "",
                "arguments": json.dumps(block.input or {}, ensure_ascii=False),
            }
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        elif block.type != "redacted_thinking":
            raise bad_request(
                f"messages has a block of type {block.type!r}; this model reads text only", "messages"
            )
    if texts or calls or not results:
        own: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
        if calls:
            own["tool_calls"] = calls
        if thoughts:
            own["reasoning_content"] = "\n".join(thoughts)
        results.append(own)
    return results


def _result(block: AnthropicBlock) -> str:
    if not isinstance(block.content, list):
        return block.content or ""
    return "\n".join(str(part.get("text", "")) for part in block.content)
