"""A model small enough to predict by hand, run through real pages: it exposes every paging fault as a wrong token.

The next token is a hash of the whole sequence *as read back through the page table*. A page reused too early, a prefix matched
wrongly or a table entry not updated changes the hash, so outputs differ from `expected_continuation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import TokenLogprobs
from minisgl.engine.step import Chunk, SampledToken


def next_token(sequence: Sequence[int], vocab_size: int) -> int:
    value = 17
    for token in sequence:
        value = (value * 1_000_003 + token + 1) % 2_147_483_647
    return value % vocab_size


def expected_continuation(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, ends: frozenset[int] = frozenset()
) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def expected_scores(prompt: Sequence[int], vocab_size: int) -> list[TokenLogprobs]:
    """What the fake says about a prompt's tokens from the second on: a token is as unlikely as it is far from the hash."""
    return [_score(prompt[:i], prompt[i], vocab_size) for i in range(1, len(prompt))]


def _score(sequence: Sequence[int], target: int, vocab_size: int) -> TokenLogprobs:
    likeliest = next_token(sequence, vocab_size)
    return TokenLogprobs(target, -float(abs(target - likeliest)), ((likeliest, 0.0),))


@dataclass
class _Handle:
    tokens: list[SampledToken]
    scores: list[list[TokenLogprobs]]
    error: Exception | None = None

    def wait(self) -> list[SampledToken]:
        if self.error is not None:
            raise self.error
        return self.tokens

    def prompt_scores(self) -> list[list[TokenLogprobs]]:
        return self.scores


@dataclass
class PagedFake:
    """A StepRunner on the host: cache_PS holds token ids where a real engine holds keys and values."""

    num_pages: int
    page_size: int
    max_rows: int
    vocab_size: int = 97
    max_seq_len: int = 64
    fail_steps: frozenset[int] = frozenset()
    fail_waits: frozenset[int] = frozenset()
    steps: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache_PS = np.full((self.num_pages, self.page_size), -1)
        self.table_RP = np.zeros((self.max_rows, self.max_seq_len // self.page_size + 2), dtype=int)
        self.last_R = np.full(self.max_rows, -1)

    def launch(self, chunks: Sequence[Chunk]) -> _Handle:
        number = len(self.steps)
        self.steps.append([(c.row, c.length) for c in chunks])
        if number in self.fail_steps:
            raise RuntimeError("launch failed on purpose")
        assert len({c.row for c in chunks}) == len(chunks)
        for chunk in chunks:
            self.table_RP[chunk.row, chunk.first_page : chunk.first_page + len(chunk.pages)] = chunk.pages
            tokens = [self.last_R[chunk.row]] if chunk.token_ids is None else chunk.token_ids
            assert len(tokens) == chunk.length
            for position, token in enumerate(tokens, chunk.start):
                page = self.table_RP[chunk.row, position // self.page_size]
                assert page > 0, "a request writes to the dummy page"
                self.cache_PS[page, position % self.page_size] = token
        sampled, scores = [], []
        for chunk in chunks:
            if chunk.score is not None:
                read = self._read(chunk.row, chunk.start + chunk.length)
                ends = range(chunk.start + 1, chunk.start + 1 + len(chunk.score.targets))
                scores.append(
                    [_score(read[:end], t, self.vocab_size) for end, t in zip(ends, chunk.score.targets)]
                )
            if chunk.sample is not None:
                end = chunk.start + chunk.length
                assert chunk.sample.position == end
                token = next_token(self._read(chunk.row, end), self.vocab_size)
                self.last_R[chunk.row] = token
                sampled.append(SampledToken(token))
        error = RuntimeError("step failed on purpose") if number in self.fail_waits else None
        return _Handle(sampled, scores, error)

    def _read(self, row: int, length: int) -> list[int]:
        positions = np.arange(length)
        pages = self.table_RP[row, positions // self.page_size]
        return self.cache_PS[pages, positions % self.page_size].tolist()
