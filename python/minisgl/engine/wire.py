"""Chunks of a step as one array of whole numbers, for ranks that run the same step without scheduling it.

A rank that does not sample needs to know where tokens are sampled, not how; so nothing of a SampleSpec travels, and a step
of 256 decodes takes 16 KiB.

    a chunk   row | start | length | number of ids | first_page | number of pages | sampled | scored | ids … | pages …

The number of ids is -1 for "the one that was sampled last"; scored is how many of the prompt's tokens are judged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import SamplingParams
from minisgl.engine.step import Chunk, SampleSpec, ScoreSpec

_HEAD = 8
ELSEWHERE = SampleSpec(SamplingParams(), 0, 0, (), 0, frozenset())
"""Stands for "rank 0 samples here"."""


def encode_chunks(chunks: Sequence[Chunk]) -> np.ndarray:
    """int64 [N]."""
    out: list[int] = []
    for c in chunks:
        num_ids = -1 if c.token_ids is None else len(c.token_ids)
        scored = 0 if c.score is None else len(c.score.targets)
        out += (c.row, c.start, c.length, num_ids, c.first_page, len(c.pages), c.sample is not None, scored)
        out += c.token_ids or ()
        out += c.pages
    return np.array(out, dtype=np.int64)


def decode_chunks(numbers: np.ndarray) -> list[Chunk]:
    """The chunks, with `ELSEWHERE` for every SampleSpec and nothing but the length of every ScoreSpec."""
    values, at, chunks = numbers.tolist(), 0, []
    while at < len(values):
        row, start, length, num_ids, first_page, num_pages, sampled, scored = values[at : at + _HEAD]
        at += _HEAD
        ids = None if num_ids < 0 else values[at : at + num_ids]
        at += max(num_ids, 0)
        pages = values[at : at + num_pages]
        at += num_pages
        sample = ELSEWHERE if sampled else None
        score = ScoreSpec((0,) * scored, 0) if scored else None
        chunks.append(Chunk(row, start, length, ids, first_page, pages, sample, score))
    return chunks
