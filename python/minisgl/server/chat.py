"""From the body of a chat request to a job: messages, tools, the rendered prompt, and the parser that fits
it.

The Anthropic and Responses endpoints translate their bodies into this one, so there is a single way to a
prompt.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minisgl.core import Grammar
from minisgl.server.errors import bad_request
from minisgl.server.parsers import ChainParser, Formats, OutputParser, chat_parser
from minisgl.server.parsers.forced import NamedCallParser
from minisgl.server.parsers.reasoning import CLOSE, OPEN, ThinkParser, start_of
from minisgl.server.parsers.tools import JsonListParser
from minisgl.server.protocol import ChatCompletionRequest, ChatMessage, NamedToolChoice, Tool
from minisgl.server.sampling import asks_for_grammar, grammar_of, max_new_tokens, sampling_params
from minisgl.server.service import Job, Service
from minisgl.server.structured import check_grammar

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def message_fields(message: ChatMessage, template: str) -> dict[str, Any]:
    """A message as chat templates expect it: content is always text, arguments are objects where they parse.

    template: its text; a template that does not know the role "developer" gets "system".
    """
    if message.role not in _ROLES:
        raise bad_request(
            f"messages has the role {message.role!r}; use one of {', '.join(_ROLES)}", "messages"
        )
    known = message.role != "developer" or "developer" in template
    fields: dict[str, Any] = {
        "role": message.role if known else "system",
        "content": flatten(message.content),
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def flatten(content: Any) -> str:
    """Text of a message's content. ApiError 400 for anything that is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(
                f"messages has content of type {part.type!r}; this model reads text only", "messages"
            )
        texts.append(part.text or part.refusal or "")
    return "\n".join(texts)


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments of an earlier call; text that is not JSON (a call cut short, say) stays text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def offered_tools(body: ChatCompletionRequest) -> list[Tool]:
    """The tools that the model will be told of. ApiError 400 for a tool_choice that cannot be met."""
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return []
    if choice is not None and choice != "auto" and not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in {t.function.name for t in tools}:
        raise bad_request(
            f"tool_choice names {choice.function.name!r}, which is not among tools", "tool_choice"
        )
    return tools


def forced_call(
    body: ChatCompletionRequest, tools: list[Tool]
) -> tuple[dict[str, Any], Callable[[], OutputParser]] | None:
    """Schema and parser of an answer that tool_choice forces to be a call; None where it may be anything."""
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        tool = next(t for t in tools if t.function.name == name)
        return _parameters(tool), functools.partial(NamedCallParser, name)
    if body.tool_choice != "required":
        return None
    calls = []
    for index, tool in enumerate(tools):
        parameters = rebased(_parameters(tool), f"#/items/anyOf/{index}/properties/parameters")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return schema, JsonListParser


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments; a function that names no parameters takes none."""
    return tool.function.parameters or {"type": "object", "properties": {}}


def rebased(schema: Any, base: str) -> Any:
    """A schema with its inner references moved to where it now sits inside a larger one."""
    if isinstance(schema, list):
        return [rebased(item, base) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: rebased(value, base) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = base + ref.removeprefix("#")
    return moved


async def render_prompt(service: Service, body: ChatCompletionRequest, tools: list[Tool]) -> str:
    """The prompt text of a conversation. ApiError 400 for messages that the template refuses."""
    if not body.messages:
        raise bad_request("messages is empty: give at least one message", "messages")
    template = service.pool.template_text
    messages = [message_fields(message, template) for message in body.messages]
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    generate = body.add_generation_prompt if body.add_generation_prompt is not None else True
    if body.continue_final_message:
        options["continue_final_message"] = True
        generate = False
    specs = [tool.model_dump(exclude_none=True) for tool in tools]
    return await service.pool.render(messages, specs or None, generate, options)


def _forced_parser(formats: Formats, prompt: str, make_parser: Callable[[], OutputParser]) -> OutputParser:
    """The parser of a forced call, behind one for the thinking that may come first."""
    if formats.reasoning != "think":
        return make_parser()
    return ChainParser(ThinkParser(start_of(prompt)), make_parser())


def after_thinking(service: Service, grammar: Grammar, prompt: str) -> Grammar:
    """The grammar, made to wait until a model that thinks has thought."""
    start, tokenizer = start_of(prompt), service.pool.tokenizer
    think_end = tokenizer.token_id(CLOSE)
    if service.formats.reasoning != "think" or start == "content" or think_end is None:
        return grammar
    think_start = None if start == "reasoning" else tokenizer.token_id(OPEN)
    return replace(grammar, think_start=think_start, think_end=think_end)


async def prepare_chat(service: Service, body: ChatCompletionRequest, request_id: str) -> Job:
    """Check and tokenize a chat request. ApiError for whatever is wrong with it."""
    arrival = time.perf_counter()
    count = service.check_count("n", body.n)
    service.admit(body.model, count)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    tools = offered_tools(body)
    forced = forced_call(body, tools)
    grammar = await service.pool.run(grammar_of, body) if asks_for_grammar(body) else None
    if forced is not None:
        if grammar is not None:
            raise bad_request("response_format and a forced tool_choice exclude each other", "tool_choice")
        grammar = Grammar("json_schema", json.dumps(forced[0]))
        await service.pool.run(check_grammar, grammar)
    prompt = await render_prompt(service, body, tools)
    if grammar is not None:
        grammar = after_thinking(service, grammar, prompt)
    ids = await service.pool.encode(prompt, service.max_model_len, add_special_tokens=False)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = max_new_tokens(asked, len(ids), service.max_model_len)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, service.client.facts.vocab_size, max_tokens, logprobs, grammar)
    names = tuple(tool.function.name for tool in tools)
    make_parser = functools.partial(chat_parser, service.formats, prompt, names)
    if forced is not None:
        make_parser = functools.partial(_forced_parser, service.formats, prompt, forced[1])
    return Job(request_id, [ids], [params], count, make_parser, True, body.priority or 0, arrival)
