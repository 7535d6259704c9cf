"""Nouns that cross subsystems: what a caller asks for, what it gets back, and what a running request is.

Nothing here touches a device. Everything is validated where it enters (`SamplingParams`, `Request`), so that the code
behind the edge may assert.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class FinishReason(str, enum.Enum):
    """Why a request ended. Values are the OpenAI API's where it has one."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away or asked to stop
    ERROR = "error"  # this request alone failed; `RequestOutput.error` says why


def _finite(name: str, value: float, low: float, high: float, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name}={value} is not allowed: {remedy}")


def _whole(name: str, value: int, low: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r} is not allowed: {remedy}")


@dataclass(frozen=True)
class Grammar:
    """What the output must look like. text is a JSON schema, a regular expression or an EBNF grammar; unused for json_object.

    A model may think first: think_end is the token after which the grammar applies. The output begins with thinking if
    think_start is None, otherwise only if its first token is think_start.
    """

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    text: str = ""
    think_start: int | None = None
    think_end: int | None = None


class TokenConstraint(Protocol):
    """A grammar in the middle of one request: which tokens may come next."""

    terminated: bool

    def fill_bitmask(self, bitmask_row: Any) -> None:
        """Set bit (token % 32) of word (token // 32) of an int32 tensor [ceil(vocab / 32)] for each allowed token."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if the grammar does not allow it."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when a request ends. Raises ValueError on anything out of range.

    max_tokens: new tokens at most; None means what the context leaves, 0 computes the prompt alone.
    temperature: 0 is greedy. top_k: keep the k likeliest, 0 or -1 is off. top_p: smallest set with this probability mass.
    min_p: drop tokens below this fraction of the likeliest one's probability.
    repetition_penalty: divides (positive) or multiplies (negative) logits of tokens seen in prompt or output, 1 is off.
    presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for tokens of the output.
    logit_bias: token id -> added to its logit. seed: same seed, same text, whatever else runs; None draws one.
    stop: strings that end the text (not part of it unless include_stop_str_in_output). stop_token_ids: tokens that do.
    min_tokens: no end before this many new tokens. ignore_eos: the model's end tokens do not end the request.
    logprobs: number of top log-probabilities to return beside the chosen token's own; None returns none.
    prompt_logprobs: the same for the tokens of the prompt but its first, which follows nothing. All of the prompt is then
    computed anew, for the prefix cache holds no logits.
    grammar: what the text must conform to; None is free text.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    MAX_LOGPROBS = 20  # OpenAI's limit of top_logprobs

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, "use a whole number of at least 0, or None")
        _finite("temperature", self.temperature, 0.0, 100.0, "use 0 (greedy) to 100")
        _whole("top_k", self.top_k, -1, "use a whole number; 0 or -1 switches it off")
        _finite("top_p", self.top_p, 0.0, 1.0, "use a value in (0, 1]")
        if self.top_p == 0.0:
            raise ValueError("top_p=0 keeps no token: use a value in (0, 1], or temperature=0 for greedy")
        _finite("min_p", self.min_p, 0.0, 1.0, "use a value in [0, 1]")
        _finite("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "use a positive value; 1 is off")
        _finite("presence_penalty", self.presence_penalty, -100.0, 100.0, "use a value in [-2, 2] as usual")
        _finite("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "use a value in [-2, 2] as usual")
        for token, bias in self.logit_bias.items():
            _whole("a token id in logit_bias", token, 0, "use token ids of at least 0")
            _finite(f"logit_bias[{token}]", bias, -1e4, 1e4, "use a value in [-100, 100] as usual")
        if self.seed is not None:
            _whole("seed", self.seed, 0, "use a whole number of at least 0, or None")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop={list(self.stop)!r} must hold non-empty strings only")
        for token in self.stop_token_ids:
            _whole("a stop token id", token, 0, "use token ids of at least 0")
        _whole("min_tokens", self.min_tokens, 0, "use a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _whole(name, count, 0, f"use 0 to {self.MAX_LOGPROBS}, or None")
                if count > self.MAX_LOGPROBS:
                    raise ValueError(f"{name}={count} is not allowed: use at most {self.MAX_LOGPROBS}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for token ids the model does not have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            bad = [t for t in ids if t >= vocab_size]
            if bad:
                raise ValueError(f"{name} names token {bad[0]}, but the vocabulary has {vocab_size} tokens")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one token: its own, and the `top` likeliest (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """What one step adds to one request: crosses from the scheduler to whoever detokenizes.

    token_id is None when the request ended without a new token (abort, error, max_tokens=0). prompt_logprobs: of the second
    prompt token to the last, in the first output of a request that asked for them.
    """

    request_id: str
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, as `LLM.generate` returns it. prompt_logprobs: see `StepOutput`."""

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Request:
    """What enters the scheduler: token ids and how to continue them. Immutable; run-time state lives in the scheduler.

    priority: lower runs first; ties by arrival.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
