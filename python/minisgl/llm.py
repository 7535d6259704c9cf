"""Offline inference: `LLM(model).generate(prompts)`, scheduler and engine in this process.

llm = LLM("path/to/Qwen3-30B-A3B")
llm.generate(["hello world"], SamplingParams(temperature=0, max_tokens=10))
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minisgl.config import EngineConfig
from minisgl.core import FinishReason, Request, RequestOutput, SamplingParams, StepOutput, TokenLogprobs
from minisgl.engine.engine import Engine
from minisgl.engine.memory import DoesNotFit
from minisgl.engine.worker import follow
from minisgl.eviction import make_policy
from minisgl.models.registry import resolve_model
from minisgl.moe.store import CacheCounters
from minisgl.moe.trace import RoutingTrace
from minisgl.planner import explain_misfit
from minisgl.resolve import Decision
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import SchedulerStats
from minisgl.text import Detokenizer, StopMatcher, Tokenizer

Prompt = str | Sequence[int]


@dataclass
class _Running:
    """Text and tokens of one request as they arrive."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    detokenizer: Detokenizer | None
    stops: StopMatcher
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    num_taken: int = 0  # characters of text that `take_text` gave out

    def take(self, output: StepOutput) -> None:
        """Add one step's token and the text that it makes certain. Sets finish_reason where a stop string ends it."""
        piece = ""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
            self.num_cached = output.num_cached_tokens
            if output.logprobs is not None:
                self.logprobs.append(output.logprobs)
            ends = output.finish_reason is FinishReason.STOP
            if self.detokenizer is not None and not ends:
                piece = self.stops.feed(self.detokenizer.feed(output.token_id))
        if self.stops.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            if self.detokenizer is not None:
                piece += self.stops.feed(self.detokenizer.finish()) + self.stops.finish()
            self.finish_reason, self.error = output.finish_reason, output.error
        self.text += piece

    def take_text(self) -> str:
        """Text that became certain since the last call."""
        piece = self.text[self.num_taken :]
        self.num_taken = len(self.text)
        return piece

    def result(self) -> RequestOutput:
        assert self.finish_reason is not None
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            num_cached_tokens=self.num_cached,
            error=self.error,
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """A model ready to generate.

    model: local folder, hub id, or a bundled name such as "demo". options: any field of the configuration by name, for example
    page_size=64, max_prefill_length=2048, moe_backend="torch" (docs/flags.md lists them). eviction_policy: an object or
    class of your own that scores cached prefixes. record_routing: keep which experts every token used in `trace` (slower: no
    CUDA graphs).
    With tensor_parallel_size=N the other ranks are child processes, or, under torchrun, the same program: there this call
    serves rank 0 until that closes, and then leaves by SystemExit(0). Call `close` when done, or use `with`.
    Raises ValueError, with the remedy, for anything that cannot work (DoesNotFit, with what would, where memory is short), and
    EngineLost where a rank fails.
    """

    def __init__(
        self, model: str, *, eviction_policy: Any = None, record_routing: bool = False, **options: Any
    ) -> None:
        requested = EngineConfig.from_kwargs(model=model, **options)
        policy = make_policy(requested.eviction.build(), eviction_policy)
        name, source = requested.model.model, requested.model.model_source
        folder = resolve_model(
            name,
            source,
            requested.model.revision,
            weights=not requested.model.dummy_weight,
            offline=requested.model.offline,
        )
        try:
            self.engine = Engine(requested, folder, record_routing=record_routing)
        except DoesNotFit as error:
            plan = explain_misfit(error, {"model": model, **options}, command="LLM")
            raise error.explained(plan) from error
        if self.engine.ranks.is_follower:
            follow(self.engine)
            raise SystemExit(0)
        self.scheduler = build_scheduler(self.engine, policy)
        self.tokenizer: Tokenizer | None = None
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            self.tokenizer = Tokenizer.load(str(folder))
        self._ids = itertools.count()
        self._live: dict[str, _Running] = {}

    @property
    def config(self) -> EngineConfig:
        """What runs: the configuration after `resolve`."""
        return self.engine.config

    @property
    def decisions(self) -> list[Decision]:
        """What `resolve` decided, and why."""
        return self.engine.decisions

    @property
    def trace(self) -> RoutingTrace | None:
        """Experts used so far; None unless record_routing was asked for and the model has experts."""
        return self.engine.trace

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def expert_cache(self) -> dict[int, CacheCounters]:
        """Hits, misses, evictions and bytes of the expert cache so far, by layer; empty without --moe-expert-offload."""
        return self.engine.expert_cache()

    def close(self) -> None:
        """Write the routing trace if one was asked for, give back pinned host memory, end the other ranks. Nothing may run
        afterwards.
        """
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt (text or token ids); results in the order of the prompts.

        params: one for all, or one a prompt. on_text(index, piece) is called with text as it becomes certain.
        A prompt that cannot run raises ValueError before anything starts; a request that fails while running ends with
        finish_reason "error" and harms no other.
        """
        items: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else prompts  # type: ignore[assignment]
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(items)
        if len(params) != len(items):
            raise ValueError(
                f"{len(items)} prompts, but {len(params)} sampling parameters: give one for all or one each"
            )
        states: list[_Running] = []
        try:
            for index, (prompt, one) in enumerate(zip(items, params)):
                try:
                    states.append(self._start(prompt, one))
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}") from None
            while any(state.finish_reason is None for state in states):
                self._step()
                for index, state in enumerate(states):
                    piece = state.take_text()
                    if piece and on_text is not None:
                        on_text(index, piece)
        finally:
            self._leave(states)
        return [state.result() for state in states]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text of one prompt's continuation, in pieces as they become certain. Several streams may be read in turns."""
        state = self._start(prompt, params or SamplingParams())
        try:
            while state.finish_reason is None:
                self._step()
                piece = state.take_text()
                if piece:
                    yield piece
        finally:
            self._leave([state])
        if state.error is not None:
            raise RuntimeError(state.error)

    def _step(self) -> None:
        """One step for everybody: each output goes to the request it belongs to."""
        for output in self.scheduler.step():
            state = self._live.get(output.request_id)
            if state is not None and state.finish_reason is None:
                state.take(output)
                if state.finish_reason is not None and output.finish_reason is None:  # by a stop string
                    self.scheduler.abort(output.request_id)

    def _leave(self, states: Sequence[_Running]) -> None:
        """End whatever of these requests still runs; if nobody else is running, wait until all pages are back."""
        for state in states:
            self.scheduler.abort(state.request_id)
            self._live.pop(state.request_id, None)
        while not self._live and self.scheduler.has_work:
            self.scheduler.step()

    def _start(self, prompt: Prompt, params: SamplingParams) -> _Running:
        text = prompt if isinstance(prompt, str) else None
        if text is not None and self.tokenizer is None:
            raise ValueError("this model folder has no tokenizer: give token ids instead of text")
        if params.stop and self.tokenizer is None:
            raise ValueError("this model folder has no tokenizer: stop strings need one, use stop_token_ids")
        if text == "":
            raise ValueError("the prompt is empty: give at least one character or token")
        ids = self.tokenizer.encode(text) if self.tokenizer and text is not None else list(prompt)
        eos = frozenset(self.engine.spec.eos_ids) | (
            self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        )
        request = Request(f"llm-{next(self._ids)}", tuple(int(i) for i in ids), params, eos)  # type: ignore[arg-type]
        self.scheduler.add(request)
        state = _Running(
            request_id=request.request_id,
            prompt=text,
            prompt_ids=list(request.prompt_ids),
            params=params,
            detokenizer=self.tokenizer.detokenizer() if self.tokenizer else None,
            stops=StopMatcher(params.stop, params.include_stop_str_in_output),
        )
        self._live[request.request_id] = state
        return state


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


@dataclass(frozen=True)
class Timing:
    """How long a generation took: seconds to the first token, and in all; tokens generated."""

    first: float
    total: float
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total if self.total > 0 else 0.0


def timed_stream(llm: LLM, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> Timing:
    """Stream one prompt through on_text and say how fast it went."""
    before, start, first = llm.stats().generated_tokens, time.perf_counter(), 0.0
    for piece in llm.stream(prompt, replace(params)):
        first = first or time.perf_counter() - start
        on_text(piece)
    total = time.perf_counter() - start
    return Timing(first, total, llm.stats().generated_tokens - before)
