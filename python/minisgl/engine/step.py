"""What the scheduler hands to the engine for one step, and what comes back. Host data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.core import SamplingParams, TokenConstraint, TokenLogprobs


class EngineLost(RuntimeError):
    """The engine can't run any more, for instance because a rank is gone: no request can be served by it."""


@dataclass(frozen=True)
class SampleSpec:
    """How to choose the token that follows a chunk.

    seed and position (index of the new token in its sequence) alone determine the random numbers, so a request draws the same
    ones whatever else runs, and again after preemption. token_ids: prompt and output so far (for penalties only; may lack
    tokens still in flight otherwise). num_prompt of them are the prompt. eos_token_ids end the request.
    """

    params: SamplingParams
    seed: int
    position: int
    token_ids: Sequence[int]
    num_prompt: int
    eos_token_ids: frozenset[int]
    constraint: TokenConstraint | None = None


@dataclass(frozen=True)
class ScoreSpec:
    """Log-probabilities wanted of a prompt: of targets[i] as the token that follows the chunk's i-th, and of the num_top
    likeliest in its place.
    """

    targets: Sequence[int]
    num_top: int


@dataclass(frozen=True)
class Chunk:
    """One request's share of a step: `length` new tokens starting at position `start`.

    token_ids: their ids, or None where it is the one token that the previous step sampled for this row and that the host may
    not know yet. row: row of the device page table. pages: page ids to enter into that row from index first_page on.
    sample: None for a chunk that does not reach the end of the known tokens. score: None for one nobody asks about.
    """

    row: int
    start: int
    length: int
    token_ids: Sequence[int] | None
    first_page: int
    pages: Sequence[int]
    sample: SampleSpec | None
    score: ScoreSpec | None = None


@dataclass(frozen=True)
class SampledToken:
    """Outcome of one chunk with a SampleSpec. error: this request alone failed (its logits were not numbers)."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
