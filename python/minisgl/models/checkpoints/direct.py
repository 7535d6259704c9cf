"""Bytes that need no conversion: from a file straight to where they stay, in pieces, by many threads.

Records of converted experts, and dense weights whose type on disk is the engine's. To a device they go through a buffer that
the copy engine can read, one for each piece under way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.models.checkpoints.files import read_into

CHUNK = 2**24  # bytes of one read
MAX_THREADS = 16


@dataclass(frozen=True)
class Span:
    """target_B, contiguous uint8 on any device, is filled with the bytes of `file` from `start` on."""

    file: Path
    start: int
    target_B: torch.Tensor

    def pieces(self) -> Iterator[Span]:
        """The same in spans of at most CHUNK bytes."""
        for first in range(0, len(self.target_B), CHUNK):
            yield Span(self.file, self.start + first, self.target_B[first : first + CHUNK])

    def read(self) -> int:
        """Bytes read."""
        if self.target_B.device.type == "cpu":
            read_into(self.file, self.start, self.target_B)
        else:
            buffer_B = torch.empty(len(self.target_B), dtype=torch.uint8, pin_memory=self.target_B.is_cuda)
            read_into(self.file, self.start, buffer_B)
            self.target_B.copy_(buffer_B)
        return len(self.target_B)


def new_pool() -> ThreadPoolExecutor:
    """Threads for reads that go to their place by themselves."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="read")


def read_spans(spans: list[Span], advance: Callable[[int], object]) -> int:
    """Read all of them. advance: told the bytes of every read, from any thread. Returns the bytes read."""

    def run(span: Span) -> int:
        num_bytes = span.read()
        advance(num_bytes)
        return num_bytes

    with new_pool() as pool:
        return sum(pool.map(run, [piece for span in spans for piece in span.pieces()]))
