"""The two ways an answer leaves: as a stream of server-sent events, or whole. Both notice when the client
goes away.

Starlette's StreamingResponse is not used: it runs two tasks and a cancel scope for each response, which
costs more than formatting the chunk, and closing the ticket is all that a lost client asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from minisgl.server.engine_client import Ticket
from minisgl.server.errors import ApiError

try:
    import orjson
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise ImportError("the server needs more packages: pip install 'minisgl[server]'") from error

logger = logging.getLogger(__name__)
HEADER_WAIT = 2.0  # seconds in which a failing request still gets an HTTP error instead of an error event
DONE = b"data: [DONE]\n\n"


class JsonAnswer(Response):
    """A JSON body made by orjson, which writes NaN as null instead of breaking JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return orjson.dumps(content)


def data_frame(payload: Any) -> bytes:
    """One server-sent event as OpenAI's clients read it."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def event_frame(name: str, payload: Any) -> bytes:
    """One named server-sent event, as the Anthropic and Responses clients read it."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


async def _close_when_gone(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.close()


@contextlib.asynccontextmanager
async def held(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Hold a ticket while answering: it is closed when the client disconnects, and at the end in any case."""
    watcher = asyncio.ensure_future(_close_when_gone(receive, ticket))
    try:
        yield
    finally:
        watcher.cancel()
        ticket.close()


class EventStream(Response):
    """A stream of frames. error_frame: how this API family tells of an error in the middle of a stream."""

    def __init__(
        self,
        ticket: Ticket,
        frames: AsyncIterator[bytes],
        error_frame: Callable[[ApiError], bytes] = lambda error: data_frame(error.body()) + DONE,
    ):
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._ticket = ticket
        self._frames = frames
        self._error_frame = error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames as they come. An error before the first one is raised, for an ordinary error
        answer.
        """
        async with held(receive, self._ticket):
            first = asyncio.ensure_future(anext(self._frames, b""))
            try:
                await asyncio.wait({first}, timeout=HEADER_WAIT)
                if first.done() and first.exception() is not None:
                    first.result()
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_all(first, send)
            finally:
                first.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, first: asyncio.Future[bytes], send: Send) -> None:
        try:
            await send({"type": "http.response.body", "body": await first, "more_body": True})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            failure = (
                error if isinstance(error, ApiError) else ApiError(500, "The stream failed.", code="internal")
            )
            if failure is not error:
                logger.exception("a stream failed")
            await send({"type": "http.response.body", "body": self._error_frame(failure), "more_body": True})
