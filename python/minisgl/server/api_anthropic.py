"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same generation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from minisgl.server.answers import EventStream, JsonAnswer, event_frame, held
from minisgl.server.blocks import Block, BlockSplitter, Change
from minisgl.server.chat import offered_tools, prepare_chat, render_prompt
from minisgl.server.errors import ApiError
from minisgl.server.generation import Generation
from minisgl.server.protocol_anthropic import CountTokensRequest, MessagesRequest, to_chat
from minisgl.server.routes import APIRouter, Request, Response, StrictRoute, service_of
from minisgl.server.service import new_id

router = APIRouter(route_class=StrictRoute, tags=["Anthropic"])

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    service = service_of(request)
    request_id = new_id("msg")
    generation = service.start(await prepare_chat(service, to_chat(body), request_id))
    answer = MessageAnswer(generation, request_id, service.model_name, body.shows_thinking)
    if body.stream:
        return EventStream(generation.ticket, answer.frames(), _error_frame)
    async with held(request.receive, generation.ticket):
        return JsonAnswer(await answer.whole())


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens a conversation has once rendered."""
    service = service_of(request)
    chat = to_chat(body)
    prompt = await render_prompt(service, chat, offered_tools(chat))
    ids = await service.pool.run(service.pool.tokenizer.encode, prompt, False)
    return JsonAnswer({"input_tokens": len(ids)})


def _error_frame(error: ApiError) -> bytes:
    return event_frame("error", error.body())


def _content(block: Block) -> dict[str, Any]:
    """A finished block."""
    if block.kind == "call":
        try:
            arguments = json.loads(block.text or "{}")
        except ValueError:  # cut short by max_tokens: what there is, under a name that no schema has
            arguments = {"_incomplete": block.text}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _start(block: Block) -> dict[str, Any]:
    """A block as it is announced, still empty."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _piece(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


class MessageAnswer:
    """A generation in Anthropic's format."""

    def __init__(self, generation: Generation, request_id: str, model: str, with_thinking: bool):
        self._generation = generation
        self._splitter = BlockSplitter(with_thinking)
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}

    def _usage(self) -> dict[str, int]:
        choice = self._generation.choices[0]
        cached = choice.num_cached_tokens
        return {
            "input_tokens": self._generation.num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": choice.num_tokens,
        }

    def _stop(self) -> dict[str, Any]:
        choice = self._generation.choices[0]
        reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": reason, "stop_sequence": None}

    async def whole(self) -> dict[str, Any]:
        """The message object."""
        async for deltas in self._generation.deltas():
            for delta in deltas:
                self._splitter.feed(delta.events)
        self._splitter.finish()
        content = [_content(block) for block in self._splitter.blocks]
        return self._head | {"content": content, **self._stop(), "usage": self._usage()}

    async def frames(self) -> AsyncIterator[bytes]:
        """Events from message_start to message_stop."""
        begun = False
        async for deltas in self._generation.deltas():
            changes = [change for delta in deltas for change in self._splitter.feed(delta.events)]
            frames = [] if begun else [self._message_start()]
            begun = True
            yield b"".join([*frames, *map(_change_frame, changes)])
        changes = self._splitter.finish()
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        frames = [*map(_change_frame, changes), event_frame("message_delta", end)]
        yield b"".join([*frames, event_frame("message_stop", {"type": "message_stop"})])

    def _message_start(self) -> bytes:
        message = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return event_frame("message_start", {"type": "message_start", "message": message})


def _change_frame(change: Change) -> bytes:
    what, block, text = change
    if what == "open":
        name, fields = "content_block_start", {"content_block": _start(block)}
    elif what == "piece":
        name, fields = "content_block_delta", {"delta": _piece(block, text)}
    else:
        name, fields = "content_block_stop", {}
    return event_frame(name, {"type": name, "index": block.index, **fields})
