"""Tokens of an engine become the text, reasoning and tool calls of an answer.

The order of the stages is the point: token -> bytes -> text -> parser (reasoning and tool markers) -> stop
strings. A stop string is looked for only in the answer proper, after markers are taken out, so it can
neither cut a marker in two nor end a request in the middle of its thoughts. Streamed and whole answers are
made from the same deltas.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from minisgl.core import FinishReason, Request, StepOutput, TokenLogprobs
from minisgl.server.engine_client import Ticket
from minisgl.server.metrics import Metrics
from minisgl.server.parsers.base import Event, OutputParser, Text, ToolStart
from minisgl.text import Detokenizer, StopMatcher


@dataclass
class Delta:
    """What one wake-up adds to one choice. finish_reason is OpenAI's word, set in the last delta of the
    choice; prompt_logprobs, where they were asked for, are in the first.
    """

    index: int
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None

    def add(self, later: Delta) -> None:
        """Append what came afterwards."""
        self.events += later.events
        self.logprobs += later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason = later.finish_reason or self.finish_reason


class Choice:
    """One answer in the making: a request of the engine and the machines its tokens go through."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, parser: OutputParser):
        params = request.params
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop token that ended it, if one did
        self.has_tool_calls = False
        self._detokenizer = detokenizer
        self._parser = parser
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._stop_tokens = request.eos_token_ids | set(params.stop_token_ids)
        self._pending = Delta(index)

    def advance(self, output: StepOutput) -> None:
        """Take in one step's output. Nothing more happens once the choice is finished."""
        if self.finish_reason is not None:
            return
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self._pending.prompt_logprobs = output.prompt_logprobs
        if output.token_id is not None:
            self._take_token(output.token_id, output)
        if output.finish_reason is not None and self.finish_reason is None:
            self._finish(output.finish_reason)

    def _take_token(self, token: int, output: StepOutput) -> None:
        self.num_tokens += 1
        if output.logprobs is not None:
            self._pending.logprobs.append(output.logprobs)
        ends = output.finish_reason == FinishReason.STOP and token in self._stop_tokens
        if ends and token in self.request.params.stop_token_ids:
            self.stop_reason = token
        if not ends or (self._stop.include and token in self.request.params.stop_token_ids):
            self._say(self._parser.feed(self._detokenizer.feed(token)))

    def _finish(self, reason: FinishReason) -> None:
        self._say(self._parser.feed(self._detokenizer.finish()))
        self._say(self._parser.finish())
        if self.finish_reason is None:
            self._flush_held()
            called = reason == FinishReason.STOP and self.has_tool_calls
            self._end("tool_calls" if called else reason.value)

    def _say(self, events: Sequence[Event]) -> None:
        for event in events:
            if self.finish_reason is not None:
                return
            if isinstance(event, Text):
                self._say_text(event.text)
            else:
                self._flush_held()
                self.has_tool_calls = self.has_tool_calls or isinstance(event, ToolStart)
                self._pending.events.append(event)

    def _say_text(self, text: str) -> None:
        if self.num_tokens >= self.request.params.min_tokens:
            text = self._stop.feed(text)
        if text:
            self._pending.events.append(Text(text))
        if self._stop.matched is not None:
            self.stop_reason = self._stop.matched
            self._end("stop")

    def _flush_held(self) -> None:
        held = self._stop.finish()
        if held:
            self._pending.events.append(Text(held))

    def _end(self, reason: str) -> None:
        self.finish_reason = self._pending.finish_reason = reason

    def take(self) -> Delta | None:
        """What has come since the last call, None if that is nothing."""
        delta = self._pending
        if not (delta.events or delta.logprobs or delta.prompt_logprobs or delta.finish_reason):
            return None
        self._pending = Delta(self.index)
        return delta


class Generation:
    """All choices of one HTTP request, and the ticket they run on."""

    def __init__(
        self,
        ticket: Ticket,
        choices: Sequence[Choice],
        num_prompt_tokens: int,
        metrics: Metrics,
        arrival: float,
    ):
        """num_prompt_tokens: each prompt once, however many choices it has. arrival: time.perf_counter() of
        the request.
        """
        self.ticket = ticket
        self.choices = list(choices)
        self._by_id = {choice.request.request_id: choice for choice in choices}
        self._metrics = metrics
        self._arrival = arrival
        self._last_token = 0.0
        self.num_prompt_tokens = num_prompt_tokens
        metrics.prompt_tokens.inc(num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object, as of now."""
        completion = self.num_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": max(c.num_cached_tokens for c in self.choices)},
        }

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each wake-up brings, until every choice has finished or the client has gone. ApiError if it
        failed.
        """
        while outputs := await self.ticket.receive():
            self._observe(sum(output.token_id is not None for output in outputs))
            touched: dict[int, Choice] = {}
            for output in outputs:
                choice = self._by_id[output.request_id]
                choice.advance(output)
                touched[choice.index] = choice
            deltas = [delta for choice in touched.values() if (delta := choice.take()) is not None]
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._finished(self.choices[delta.index])
            if deltas:
                yield deltas

    def _finished(self, choice: Choice) -> None:
        self.ticket.end(choice.request.request_id)  # a stop string ends it here before the engine knows
        self._metrics.finished(choice.finish_reason or "")
        self._metrics.request_latency.observe(time.perf_counter() - self._arrival)

    def _observe(self, num_outputs: int) -> None:
        now = time.perf_counter()
        if self._last_token:
            self._metrics.inter_token_latency.observe(now - self._last_token)
        else:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last_token = now
        self._metrics.generation_tokens.inc(num_outputs)
