"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from minisgl.server.answers import DONE, EventStream, JsonAnswer, data_frame, held
from minisgl.server.chat import prepare_chat
from minisgl.server.chat_format import MessageBuilder, delta_fields, logprob_content
from minisgl.server.generation import Delta, Generation
from minisgl.server.protocol import ChatCompletionRequest, StreamOptions
from minisgl.server.routes import APIRouter, Request, Response, StrictRoute, service_of
from minisgl.server.service import Service, new_id

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    service = service_of(request)
    request_id = new_id("chatcmpl")
    generation = service.start(await prepare_chat(service, body, request_id))
    answer = ChatAnswer(service, generation, request_id, bool(body.logprobs))
    if body.stream:
        return EventStream(generation.ticket, answer.frames(body.stream_options or StreamOptions()))
    async with held(request.receive, generation.ticket):
        return JsonAnswer(await answer.whole())


class ChatAnswer:
    """A generation in OpenAI's chat format."""

    def __init__(self, service: Service, generation: Generation, request_id: str, with_logprobs: bool):
        self._tokenizer = service.pool.tokenizer
        self._generation = generation
        self._with_logprobs = with_logprobs
        self._head = {"id": request_id, "created": int(time.time()), "model": service.model_name}

    def _logprobs(self, delta: Delta | MessageBuilder) -> dict[str, Any] | None:
        return logprob_content(self._tokenizer, delta.logprobs) if self._with_logprobs else None

    async def whole(self) -> dict[str, Any]:
        """The chat.completion object."""
        builders = [MessageBuilder() for _ in self._generation.choices]
        async for deltas in self._generation.deltas():
            for delta in deltas:
                builders[delta.index].add(delta)
        choices = [
            {
                "index": index,
                "message": builder.message(),
                "logprobs": self._logprobs(builder),
                "finish_reason": builder.finish_reason,
                "stop_reason": self._generation.choices[index].stop_reason,
            }
            for index, builder in enumerate(builders)
        ]
        head = self._head | {"object": "chat.completion"}
        return head | {"choices": choices, "usage": self._generation.usage()}

    async def frames(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Chunks as server-sent events: the role first, then deltas, the usage if asked for, and [DONE]."""
        chunk: dict[str, Any] = self._head | {"object": "chat.completion.chunk"}
        if options.include_usage:
            chunk["usage"] = None
        begun: set[int] = set()
        async for deltas in self._generation.deltas():
            if options.continuous_usage_stats:
                chunk["usage"] = self._generation.usage()
            frames = []
            for delta in deltas:
                fields = delta_fields(delta.events)
                if delta.index not in begun:
                    begun.add(delta.index)
                    fields = {"role": "assistant", "content": "", **fields}
                choice: dict[str, Any] = {
                    "index": delta.index,
                    "delta": fields,
                    "logprobs": self._logprobs(delta),
                }
                choice["finish_reason"] = delta.finish_reason
                if delta.finish_reason is not None:
                    choice["stop_reason"] = self._generation.choices[delta.index].stop_reason
                frames.append(data_frame(chunk | {"choices": [choice]}))
            yield b"".join(frames)
        if options.include_usage:
            yield data_frame(chunk | {"choices": [], "usage": self._generation.usage()}) + DONE
        else:
            yield DONE
