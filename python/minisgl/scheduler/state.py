"""What the scheduler remembers of one request while it waits and runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.core import FinishReason, Request, TokenConstraint, TokenLogprobs
from minisgl.engine.step import ScoreSpec


@dataclass(eq=False)
class RequestState:
    """Run-time state of a request. Owned by the scheduler; everything else sees parts of it.

    Lifetime of its tokens (positions in the sequence):

        |<------------ prompt ------------>|<----- generated ----->|
        |<- cached ->|
        |<------ num_computed ----->|                                 keys and values are, or will be once the step in
                                                                      flight retires, in the cache
        |<------------------ len(token_ids) --------->|               known on the host
        |<------------------ num_tokens ---------------->|            known, plus those a step in flight will add

    token_ids: prompt and generated tokens known on the host. num_pending: tokens that steps in flight will add.
    pages: KV pages in order; pages[: num_shared] belong to the prefix cache and are locked through `lock`.
    row: row of the device page table, or -1 while waiting; its first num_table_pages entries are up to date.
    num_in_flight: launched steps that have not retired. prompt_logprobs: those asked for and known so far.
    """

    request: Request
    arrival: int
    max_tokens: int
    token_ids: list[int]
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    lock: Any = None
    row: int = -1
    num_table_pages: int = 0
    num_in_flight: int = 0
    seed: int = 0
    finish_reason: FinishReason | None = None
    constraint: TokenConstraint | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens known on the host."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values no step has been launched for; 1 for a request that decodes."""
        return self.num_tokens - self.num_computed

    @property
    def is_complete(self) -> bool:
        """No further step is needed: finished, or the steps in flight bring the last token."""
        return self.finish_reason is not None or self.num_generated + self.num_pending >= self.max_tokens

    @property
    def is_scored(self) -> bool:
        """Nothing is left to be learnt about the prompt: its positions may come from the prefix cache."""
        return self.request.params.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt - 1

    def score_spec(self, start: int, length: int) -> ScoreSpec | None:
        """What the prompt's part of a chunk says about the tokens after it; None if nobody asks."""
        num_top = self.request.params.prompt_logprobs
        targets = self.token_ids[start + 1 : min(start + length + 1, self.num_prompt)]
        if num_top is None or self.is_scored or not targets:
            return None
        return ScoreSpec(targets, num_top)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """For the request's first output: all of them, if they were asked for."""
        return None if self.request.params.prompt_logprobs is None else tuple(self.prompt_logprobs)

    def end_after(self, token_id: int) -> FinishReason | None:
        """Why the request ends with this token, which token_ids has already; None if it goes on. Advances the grammar."""
        params = self.request.params
        if self.constraint is not None and not self.constraint.terminated:
            self.constraint.accept(token_id)
        if self.num_generated >= params.min_tokens:
            ended = token_id in self.request.eos_token_ids and not params.ignore_eos
            if ended or token_id in params.stop_token_ids:
                return FinishReason.STOP
            if self.constraint is not None and self.constraint.terminated:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated >= self.max_tokens else None

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.request.priority, self.arrival)

    @property
    def needs_host_tokens(self) -> bool:
        """The next step depends on the value of the last token on the host: no overlap for this request."""
        p = self.request.params
        penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return penalized or self.constraint is not None
