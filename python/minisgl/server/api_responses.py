"""POST /v1/responses: OpenAI's newer API over the same generation. Stateless: a response cannot be fetched
or continued.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from minisgl.server.answers import EventStream, JsonAnswer, event_frame, held
from minisgl.server.blocks import Block, BlockSplitter, Change
from minisgl.server.chat import prepare_chat
from minisgl.server.errors import ApiError
from minisgl.server.generation import Generation
from minisgl.server.protocol_responses import ResponsesRequest, to_chat
from minisgl.server.routes import APIRouter, Request, Response, StrictRoute, service_of
from minisgl.server.service import new_id

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/responses", response_model=None)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input, whole or as a stream of events."""
    service = service_of(request)
    request_id = new_id("resp")
    generation = service.start(await prepare_chat(service, to_chat(body), request_id))
    answer = ResponseAnswer(generation, request_id, service.model_name, body)
    if body.stream:
        return EventStream(generation.ticket, answer.frames(), answer.error_frame)
    async with held(request.receive, generation.ticket):
        return JsonAnswer(await answer.whole())


def _item(block: Block, request_id: str, status: str) -> dict[str, Any]:
    """An output item as it is now; an announced one is still empty."""
    item_id = f"{block.kind}-{block.index}-{request_id}"
    if block.kind == "call":
        return {
            "type": "function_call",
            "id": item_id,
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
            "status": status,
        }
    if block.kind == "reasoning":
        content = [_part(block)] if block.text else []
        return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
    content = [_part(block)] if status != "in_progress" else []
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


class ResponseAnswer:
    """A generation in the Responses format."""

    def __init__(self, generation: Generation, request_id: str, model: str, body: ResponsesRequest):
        self._generation = generation
        self._id = request_id
        self._splitter = BlockSplitter()
        self._number = 0  # of the next event
        self._head = {
            "id": request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "tool_choice": body.model_dump().get("tool_choice") or "auto",
            "tools": [tool.model_dump() for tool in body.tools or []],
            "text": {"format": {"type": "text"}},
            "store": False,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._generation.choices[0]
        return {
            "input_tokens": self._generation.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": choice.num_cached_tokens},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._generation.num_prompt_tokens + choice.num_tokens,
        }

    def _response(self, status: str) -> dict[str, Any]:
        """The response object; while in progress it has no output and no usage."""
        running = status == "in_progress"
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = [] if running else [_item(block, self._id, "completed") for block in self._splitter.blocks]
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": output,
            "usage": None if running else self._usage(),
        }

    def _final_status(self) -> str:
        return "incomplete" if self._generation.choices[0].finish_reason == "length" else "completed"

    async def whole(self) -> dict[str, Any]:
        """The response object."""
        async for deltas in self._generation.deltas():
            for delta in deltas:
                self._splitter.feed(delta.events)
        self._splitter.finish()
        return self._response(self._final_status())

    def _frame(self, event: str, /, **fields: Any) -> bytes:
        payload = {"type": event, "sequence_number": self._number, **fields}
        self._number += 1
        return event_frame(event, payload)

    async def frames(self) -> AsyncIterator[bytes]:
        """Events from response.created to response.completed."""
        begun = False
        async for deltas in self._generation.deltas():
            frames: list[bytes] = []
            if not begun:
                begun = True
                running = self._response("in_progress")
                frames.append(self._frame("response.created", response=running))
                frames.append(self._frame("response.in_progress", response=running))
            for delta in deltas:
                for change in self._splitter.feed(delta.events):
                    frames += self._change_frames(change)
            yield b"".join(frames)
        frames = [frame for change in self._splitter.finish() for frame in self._change_frames(change)]
        status = self._final_status()
        yield b"".join([*frames, self._frame(f"response.{status}", response=self._response(status))])

    def error_frame(self, error: ApiError) -> bytes:
        """An error in the middle of the stream."""
        return self._frame("error", code=error.code, message=error.message, param=error.param)

    def _change_frames(self, change: Change) -> list[bytes]:
        what, block, text = change
        place = {"output_index": block.index, "item_id": f"{block.kind}-{block.index}-{self._id}"}
        part = place | {"content_index": 0}
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[
            block.kind
        ]
        if what == "piece":
            where = place if block.kind == "call" else part
            extra = {"logprobs": []} if block.kind == "text" else {}
            return [self._frame(f"response.{kind}.delta", delta=text, **where, **extra)]
        if what == "open":
            item = _item(block, self._id, "in_progress")
            frames = [self._frame("response.output_item.added", output_index=block.index, item=item)]
            if block.kind == "text":
                frames.append(self._frame("response.content_part.added", part=_part(block), **part))
            return frames
        frames = []
        if block.kind == "call":
            frames.append(
                self._frame(f"response.{kind}.done", arguments=block.text, name=block.name, **place)
            )
        else:
            extra = {"logprobs": []} if block.kind == "text" else {}
            frames.append(self._frame(f"response.{kind}.done", text=block.text, **part, **extra))
            if block.kind == "text":
                frames.append(self._frame("response.content_part.done", part=_part(block), **part))
        item = _item(block, self._id, "completed")
        return [*frames, self._frame("response.output_item.done", output_index=block.index, item=item)]
