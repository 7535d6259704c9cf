"""The API process's view of the engine: open requests, their outputs, and whether the engine lives.

All of it runs on the event loop. A `Ticket` is what one HTTP request holds: it may cover several engine
requests (n > 1, several prompts), collects their outputs in one mailbox, and its `close` ends whatever still
runs. Nothing else ever aborts, so "the client went away" has one path whether the answer is streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Literal

from minisgl.core import FinishReason, Request, StepOutput
from minisgl.server.errors import ApiError
from minisgl.server.ipc import (
    Abort,
    Add,
    ApiEnd,
    Beat,
    EngineFacts,
    Event,
    Failed,
    Outputs,
    Ready,
    Rejected,
    Stop,
)

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.002  # that events may take before it is the turn of those who answer, /health among them
State = Literal["loading", "ready", "draining", "dead"]


class Ticket:
    """The open requests of one HTTP request. Iterate `receive` until `open` is empty; always `close`."""

    def __init__(self, client: EngineClient, requests: Sequence[Request]):
        self._client = client
        self.open = {r.request_id for r in requests}  # those that still run
        self.closed = False
        self.failure: ApiError | None = None
        self._items: list[StepOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: StepOutput) -> None:
        """Deliver an output; wakes `receive`."""
        self._items.append(output)
        if output.finish_reason is not None:
            self.open.discard(output.request_id)
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End everything with an error; `receive` raises it."""
        self.failure = error
        self.open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> list[StepOutput]:
        """The outputs since the last call; waits for the first. Empty only when there will be no more."""
        while not self._items or self.failure is not None:
            if self.failure is not None:
                raise self.failure
            if self.closed or not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items

    def end(self, request_id: str) -> None:
        """Abort one request; its remaining outputs are not delivered."""
        if request_id in self.open:
            self.open.discard(request_id)
            self._client.forget([request_id])

    def expire_after(self, seconds: float) -> None:
        """End everything with an error if it takes longer; 0 is no limit."""
        if seconds > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        if self.open:
            self._client.forget(sorted(self.open))
            self.fail(
                ApiError(503, f"The request took longer than {seconds:g} seconds.", code="request_timeout")
            )

    def close(self) -> None:
        """Abort what still runs and wake whoever waits. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed:
            self.closed = True
            self._client.forget(sorted(self.open))
            self.open.clear()
            self._wake()


class EngineClient:
    """Sends requests to the engine and hands its outputs to their tickets."""

    def __init__(self, end: ApiEnd, max_open_requests: int):
        self._end = end
        self._max_open = max_open_requests
        self._tickets: dict[str, Ticket] = {}
        self.state: State = "loading"
        self.facts = EngineFacts(0, 0)
        self.beat = Beat({})
        self.last_beat = 0.0
        self.failure = ""
        self.idle = asyncio.Event()  # set while no request is open
        self.idle.set()
        self.changed = asyncio.Event()  # set once the state is ready or dead

    @property
    def num_open(self) -> int:
        """Requests the engine works on or has queued for us."""
        return len(self._tickets)

    def check_open(self, num_more: int = 1) -> None:
        """Raise the 503 a new request would get; costs nothing, so it is asked before tokenizing."""
        if self.state == "loading":
            raise ApiError(503, "The model is still loading. Try again soon.", code="loading")
        if self.state == "draining":
            raise ApiError(503, "The server is shutting down.", code="draining")
        if self.state == "dead":
            raise ApiError(500, f"The engine has stopped: {self.failure}", code="engine_dead")
        if self.num_open + num_more > self._max_open:
            message = f"{self.num_open} requests are open, {self._max_open} is the limit. Try again soon."
            raise ApiError(503, message, code="queue_full")

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Send requests to the engine. ApiError 503 when it cannot take them now."""
        self.check_open(len(requests))
        ticket = Ticket(self, requests)
        for request in requests:
            self._tickets[request.request_id] = ticket
            self._end.send(Add(request))
        self.idle.clear()
        return ticket

    def forget(self, request_ids: Sequence[str]) -> None:
        """Abort requests; outputs that are still on the way are dropped."""
        known = [i for i in request_ids if self._tickets.pop(i, None) is not None]
        if known:
            self._end.send(Abort(known))
        self._check_idle()

    def abort(self, request_id: str | None) -> int:
        """Abort by id from outside (None: all); their clients get finish reason "abort". Returns how many."""
        known = [
            i
            for i in self._tickets
            if request_id is None or i == request_id or i.rsplit("-", 1)[0] == request_id
        ]
        if known:
            self._end.send(Abort(known))
        return len(known)

    async def listen(self) -> None:
        """Hand out events until cancelled."""
        turn = time.monotonic()
        while True:
            if (
                time.monotonic() - turn > _TURN_SECONDS
            ):  # a message that is there already is received without waiting
                await asyncio.sleep(0)
                turn = time.monotonic()
            event = await self._end.receive()
            try:
                self.handle(event)
            except Exception:  # a lost output is bad, a deaf server is worse
                logger.exception("an event of the engine could not be handled")

    def handle(self, event: Event) -> None:
        """Apply one event of the engine."""
        if isinstance(event, Outputs):
            for output in event.outputs:
                self._deliver(output)
        elif isinstance(event, Beat):
            self.beat, self.last_beat = event, time.monotonic()
        elif isinstance(event, Rejected):
            ticket = self._tickets.pop(event.request_id, None)
            if ticket is not None:
                self.forget(sorted(ticket.open))
                ticket.fail(ApiError(400, event.message))
            self._check_idle()
        elif isinstance(event, Ready):
            self.facts = event.facts
            if self.state == "loading":
                self.state = "ready"
            self.changed.set()
        elif isinstance(event, Failed):
            self.die(event.message)

    def _deliver(self, output: StepOutput) -> None:
        ticket = self._tickets.get(output.request_id)
        if ticket is None:
            return  # its client is gone
        if output.finish_reason is not None:
            del self._tickets[output.request_id]
            self._check_idle()
        if output.finish_reason == FinishReason.ERROR:
            self.forget(sorted(ticket.open - {output.request_id}))
            ticket.fail(
                ApiError(
                    500, f"The engine could not answer this request: {output.error}", code="engine_error"
                )
            )
        else:
            ticket.put(output)

    def _check_idle(self) -> None:
        if not self._tickets:
            self.idle.set()

    def drain(self) -> None:
        """Take no more requests; open ones go on."""
        if self.state != "dead":
            self.state = "draining"

    def die(self, message: str) -> None:
        """The engine is gone: every open request gets an error."""
        if self.state == "dead":
            return
        self.state, self.failure = "dead", message
        tickets = set(self._tickets.values())
        self._tickets.clear()
        for ticket in tickets:
            ticket.fail(ApiError(500, f"The engine has stopped: {message}", code="engine_dead"))
        self._check_idle()
        self.changed.set()

    def fail_open(self, error: ApiError) -> None:
        """End every open request with an error and tell the engine."""
        tickets = set(self._tickets.values())
        self.forget(list(self._tickets))
        for ticket in tickets:
            ticket.fail(error)

    def stop(self) -> None:
        """Tell the engine to exit."""
        self._end.send(Stop())

    def close(self) -> None:
        """Close the sockets."""
        self._end.close()
