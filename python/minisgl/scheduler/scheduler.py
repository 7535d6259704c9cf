"""The loop: plan a step, launch it, retire the one before, hand out its tokens.

With overlap the device computes step n while the host plans and launches step n + 1; a token reaches the host one step late.
The next step does not need the host to know it: the engine keeps the last sampled token of every row on the device.

    host    plan 1 | launch 1 | plan 2 | launch 2 | retire 1 | plan 3 | launch 3 | retire 2 ...
    device           [------- step 1 -------][------- step 2 -------][------ step 3 ...

A request that ended in step n may already be part of step n + 1; that extra token is dropped, and its pages are taken back
only when step n + 1 has retired.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisgl.config import SchedulerConfig
from minisgl.core import FinishReason, Grammar, Request, StepOutput, TokenConstraint, TokenLogprobs
from minisgl.engine.step import Chunk, EngineLost, SampledToken, SampleSpec
from minisgl.kvcache import CacheStats
from minisgl.scheduler.pages import PageManager
from minisgl.scheduler.planning import may_admit, share_budget
from minisgl.scheduler.state import RequestState


class StepHandle(Protocol):
    """A launched step. `wait` blocks until it is done and returns one SampledToken for each chunk with a SampleSpec; after
    it, `prompt_scores` gives the log-probabilities for each chunk with a ScoreSpec."""

    def wait(self) -> list[SampledToken]: ...

    def prompt_scores(self) -> list[list[TokenLogprobs]]: ...


class StepRunner(Protocol):
    """What the scheduler needs of an engine."""

    vocab_size: int
    max_seq_len: int

    def launch(self, chunks: Sequence[Chunk]) -> StepHandle: ...


@dataclass(frozen=True)
class SchedulerStats:
    """Counters of the scheduler and of its prefix cache; token counts are totals since the start."""

    num_running: int
    num_waiting: int
    pages_free: int
    pages_evictable: int
    pages_protected: int
    pages_total: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    prefix: CacheStats


@dataclass
class _Flight:
    """A launched step: who takes part, what comes back for whom, and pages to free once it is done."""

    states: list[RequestState]
    samples: list[bool]
    scored: list[RequestState]
    handle: StepHandle
    duplicates: list[int] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prompts, prefix reuse and preemption by recomputation. Not thread-safe."""

    def __init__(
        self,
        runner: StepRunner,
        pages: PageManager,
        config: SchedulerConfig,
        constraint_factory: Callable[[Grammar], TokenConstraint] | None = None,
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._config = config
        self._constraint_factory = constraint_factory
        self._running: list[RequestState] = []
        self._waiting: list[tuple[tuple[int, int], RequestState]] = []  # heap by order
        self._states: dict[str, RequestState] = {}
        self._flight: _Flight | None = None
        self._outputs: list[StepOutput] = []
        self._free_rows = list(range(config.max_running_requests - 1, -1, -1))
        self._arrivals = 0
        self._totals = dict.fromkeys(("prompt", "cached", "generated", "preemptions", "steps"), 0)

    # --- requests in and out -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError with the remedy for one that can never run; nothing is kept of it then."""
        num_prompt, limit = len(request.prompt_ids), self._runner.max_seq_len
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        if num_prompt == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if num_prompt >= limit:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but the context holds {limit}, the answer included: "
                "shorten the prompt or raise --max-seq-len-override"
            )
        vocab = self._runner.vocab_size
        bad = [t for t in request.prompt_ids if not 0 <= t < vocab]
        if bad:
            raise ValueError(f"the prompt holds token {bad[0]}, but the vocabulary has {vocab} tokens")
        request.params.check_vocabulary(vocab)
        total = self._pages.allocator.total
        if self._pages.pages_for(num_prompt + 1) > total:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but the KV cache holds {total * self._pages.page_size}: "
                f"set --num-pages to at least {self._pages.pages_for(num_prompt + 1) + 1}"
            )
        room = min(limit, total * self._pages.page_size) - num_prompt
        constraint = None
        if request.params.grammar is not None:
            if self._constraint_factory is None:
                raise ValueError("structured output needs a grammar engine: pip install 'minisgl[server]'")
            constraint = self._constraint_factory(request.params.grammar)
        asked = room if request.params.max_tokens is None else request.params.max_tokens
        seed = request.params.seed if request.params.seed is not None else random.getrandbits(63)
        state = RequestState(
            request=request,
            arrival=self._arrivals,
            max_tokens=max(1, min(asked, room)),  # a request for none is let go of at the first
            token_ids=list(request.prompt_ids),
            seed=seed,
            constraint=constraint,
        )
        self._arrivals += 1
        self._states[request.request_id] = state
        heapq.heappush(self._waiting, (state.order, state))

    def abort(self, request_id: str) -> None:
        """End a request; its StepOutput comes with the next step. Unknown ids are ignored."""
        state = self._states.get(request_id)
        if state is not None and state.finish_reason is None:
            self._finish(state, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._outputs or self._flight)

    def stats(self) -> SchedulerStats:
        counts, totals = self._pages.counts(), self._totals
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=sum(1 for state in self._states.values() if state.row < 0),
            pages_free=counts.free,
            pages_evictable=counts.evictable,
            pages_protected=counts.protected,
            pages_total=counts.total,
            prompt_tokens=totals["prompt"],
            cached_tokens=totals["cached"],
            generated_tokens=totals["generated"],
            preemptions=totals["preemptions"],
            steps=totals["steps"],
            prefix=self._pages.cache.stats(),
        )

    # --- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Launch the next step if there is one, retire the one before; returns what became known meanwhile."""
        overlap = not self._config.disable_overlap and not any(s.needs_host_tokens for s in self._running)
        if not overlap:
            self._retire()
        launched = self._launch()
        if launched is not None or self._flight is not None:
            self._retire()
        self._flight = launched
        if not overlap:
            self._retire()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _launch(self) -> _Flight | None:
        batch = self._schedule()
        if not batch:
            return None
        chunks, duplicates, samples = [], [], []
        for state, num_tokens in batch:
            chunk = self._make_chunk(state, num_tokens)
            chunks.append(chunk)
            samples.append(chunk.sample is not None)
        try:
            handle = self._runner.launch(chunks)
        except EngineLost:
            raise
        except Exception as error:
            self._fail([state for state, _ in batch], error)
            return None
        for (state, num_tokens), sampled in zip(batch, samples):
            state.num_computed += num_tokens
            state.num_in_flight += 1
            state.num_table_pages = len(state.pages)
            if sampled:
                state.num_pending += 1
                if state.num_computed == state.num_prompt:
                    duplicates += self._share_prompt(state)
        self._totals["steps"] += 1
        scored = [state for (state, _), chunk in zip(batch, chunks) if chunk.score is not None]
        return _Flight([state for state, _ in batch], samples, scored, handle, duplicates)

    def _share_prompt(self, state: RequestState) -> list[int]:
        """Let others use this prompt's pages from the next step on (the device runs steps in order). Returns the pages that
        the cache had already; the step in flight still writes them."""
        duplicates = self._pages.share(state, state.num_prompt)
        if duplicates:
            state.num_table_pages = 0
        return duplicates

    def _make_chunk(self, state: RequestState, num_tokens: int) -> Chunk:
        start = state.num_computed
        known = state.token_ids[start : start + num_tokens]
        assert len(known) == num_tokens or (num_tokens == 1 and state.num_pending == 1)
        sample = None
        if start + num_tokens == state.num_tokens:
            sample = SampleSpec(
                params=state.request.params,
                seed=state.seed,
                position=state.num_tokens,
                token_ids=state.token_ids,
                num_prompt=state.num_prompt,
                eos_token_ids=state.request.eos_token_ids,
                constraint=state.constraint,
            )
        return Chunk(
            row=state.row,
            start=start,
            length=num_tokens,
            token_ids=known or None,
            first_page=state.num_table_pages,
            pages=state.pages[state.num_table_pages :],
            sample=sample,
            score=state.score_spec(start, num_tokens),
        )

    # --- choosing who runs ---------------------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[RequestState, int]]:
        """(request, tokens) of the next step, running ones first; their pages are already theirs."""
        while True:
            running = sorted((s for s in self._running if not s.is_complete), key=lambda s: s.order)
            batch = self._claim(running)
            if batch is not None:
                return batch + self._admit(sum(num_tokens for _, num_tokens in batch))

    def _claim(self, running: list[RequestState]) -> list[tuple[RequestState, int]] | None:
        """Tokens and pages for running requests, oldest first; None where a lack of pages changed who runs."""
        shares = share_budget([s.num_uncomputed for s in running], self._config.step_tokens)
        batch = [(state, share) for state, share in zip(running, shares) if share > 0]
        for state, num_tokens in batch:
            if self._pages.grow(state, state.num_computed + num_tokens):
                continue
            if self._flight is not None:
                self._retire()  # frees pages of requests that ended, and leaves the victim idle
            else:
                self._preempt(running[-1])
            return None
        return batch

    def _admit(self, used: int) -> list[tuple[RequestState, int]]:
        """Waiting requests that fit into what is left of the token budget, in order, none overtaken."""
        batch = []
        while self._waiting and self._free_rows and used < self._config.step_tokens:
            state = self._waiting[0][1]
            if state.finish_reason is not None:  # aborted while waiting
                heapq.heappop(self._waiting)
                continue
            self._pages.attach_prefix(state)
            num_cached = state.num_computed
            num_tokens = min(state.num_uncomputed, self._config.step_tokens - used)
            missing = self._pages.pages_for(state.num_tokens + 1) - len(state.pages)
            fits = may_admit(missing, self._pages.num_available, len(self._running))
            if not fits or not self._pages.grow(state, state.num_computed + num_tokens):
                self._pages.release(state)
                break
            heapq.heappop(self._waiting)
            self._enter(state, num_cached)
            batch.append((state, num_tokens))
            used += num_tokens
        return batch

    def _enter(self, state: RequestState, num_cached: int) -> None:
        """Into the running set. Counts the prompt the first time; recomputation after preemption is not a new prompt."""
        state.row = self._free_rows.pop()
        self._running.append(state)
        if state.num_generated == 0:
            state.num_cached = num_cached
            self._totals["prompt"] += state.num_prompt
            self._totals["cached"] += num_cached

    def _preempt(self, state: RequestState) -> None:
        """Take a running request's pages; it waits again and will recompute what the cache no longer holds."""
        assert state.num_in_flight == 0
        self._leave(state)
        if not state.is_scored:
            state.prompt_logprobs.clear()
        self._totals["preemptions"] += 1
        heapq.heappush(self._waiting, (state.order, state))

    def _leave(self, state: RequestState) -> None:
        """Out of the running set: pages back to the cache, row back to the pool."""
        self._running.remove(state)
        self._pages.release(state)
        self._free_rows.append(state.row)
        state.row, state.num_table_pages = -1, 0

    # --- tokens back ---------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Wait for the step in flight and take in its tokens."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            tokens = iter(flight.handle.wait())
            scores = flight.handle.prompt_scores() if flight.scored else []
        except EngineLost:
            raise
        except Exception as error:
            for state in flight.states:
                state.num_in_flight -= 1
            self._pages.free_duplicates(flight.duplicates)
            self._fail(flight.states, error)
            return
        self._pages.free_duplicates(flight.duplicates)
        for state, logprobs in zip(flight.scored, scores):
            state.prompt_logprobs += logprobs
        for state, sampled in zip(flight.states, flight.samples):
            state.num_in_flight -= 1
            if sampled:
                state.num_pending -= 1
                self._take_token(state, next(tokens))
            if state.finish_reason is not None and state.num_in_flight == 0 and state.row >= 0:
                self._leave(state)

    def _take_token(self, state: RequestState, token: SampledToken) -> None:
        if state.finish_reason is not None:  # it ended while this step was in flight
            state.num_computed = min(state.num_computed, len(state.token_ids))
            return
        if token.error is not None:
            self._finish(state, FinishReason.ERROR, token.error)
            return
        if state.request.params.max_tokens == 0:
            self._finish(state, FinishReason.LENGTH)
            return
        state.token_ids.append(token.token_id)
        self._totals["generated"] += 1
        reason = state.end_after(token.token_id)
        output = StepOutput(
            request_id=state.request.request_id,
            token_id=token.token_id,
            logprobs=token.logprobs,
            finish_reason=reason,
            num_cached_tokens=state.num_cached,
            prompt_logprobs=state.take_prompt_logprobs() if state.num_generated == 1 else None,
        )
        self._outputs.append(output)
        if reason is not None:
            self._forget(state, reason)

    def _finish(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """End a request without a new token."""
        scores = state.take_prompt_logprobs() if reason is FinishReason.LENGTH else None
        output = StepOutput(
            state.request.request_id, None, None, reason, error, state.num_cached, prompt_logprobs=scores
        )
        self._outputs.append(output)
        self._forget(state, reason)
        if state.row >= 0 and state.num_in_flight == 0:
            self._leave(state)

    def _forget(self, state: RequestState, reason: FinishReason) -> None:
        state.finish_reason = reason
        del self._states[state.request.request_id]

    def _fail(self, states: list[RequestState], error: Exception) -> None:
        """A step failed as a whole: its requests end with the error, and nothing cached is trusted any more."""
        for state in states:
            self._pages.discard(state)
            if state.finish_reason is None:
                self._finish(state, FinishReason.ERROR, f"{type(error).__name__}: {error}")
            elif state.row >= 0 and state.num_in_flight == 0:
                self._leave(state)
        self._pages.forget_all()
