"""Bodies of OpenAI's Responses API, and their translation into a chat request. Nothing is stored between
requests.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from minisgl.server.errors import bad_request
from minisgl.server.protocol import Body, ChatCompletionRequest, ContentPart, chat_request


class ResponseItem(Body):
    """One item of input: a message, a call the model made, or what the call gave."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponseTool(Body):
    """A function that the model may call."""

    type: str
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseTextFormat(Body):
    """What the answer must look like; the schema stands here directly."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseText(Body):
    """The `text` object."""

    format: ResponseTextFormat | None = None


class ResponseReasoning(Body):
    """The `reasoning` object."""

    effort: str | None = None


class NamedResponseTool(Body):
    """tool_choice that names one function."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[ResponseItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


def to_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request in the terms of chat completions. ApiError 400 for what needs a memory or is not
    text.
    """
    if body.previous_response_id:
        raise bad_request(
            "no responses are stored here: send the whole conversation as input", "previous_response_id"
        )
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [ResponseItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        _add_item(messages, item)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _response_format(body.text),
    }
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    named = isinstance(choice, NamedResponseTool)
    fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice
    return chat_request(fields)


def _add_item(messages: list[dict[str, Any]], item: ResponseItem) -> None:
    kind = item.type or "message"
    if kind == "message":
        parts = item.content
        content = [part.model_dump() for part in parts] if isinstance(parts, list) else parts
        messages.append({"role": item.role or "user", "content": content})
    elif kind == "function_call":
        function = {"name": item.name or "", "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.output
        content = [part.model_dump() for part in output] if isinstance(output, list) else output
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif kind != "reasoning":
        raise bad_request(f"input has an item of type {kind!r}, which this model cannot read", "input")


def _tool(tool: ResponseTool) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        raise bad_request(
            f"tools has a tool of type {tool.type!r}; only named functions can be called", "tools"
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _response_format(text: ResponseText | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": text.format.name, "schema": text.format.schema_}}
