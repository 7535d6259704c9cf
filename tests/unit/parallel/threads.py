"""Ranks as threads of one process: a `Group` over a shared board, for tests of what is done with a group.

As strict as the real ones: every rank must take part in every collective with the same shape, and gets a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from minisgl.parallel import Flight, Group

T = TypeVar("T")


class _Board:
    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        all_values = list(self.slots)
        self.barrier.wait()
        return all_values


class ThreadGroup(Group):
    """One rank's end of a board. sent_rows counts the rows it sent to other ranks."""

    def __init__(self, board: _Board, rank: int, size: int) -> None:
        self._board, self.rank, self.size = board, rank, size
        self.sent_rows: list[int] = []

    def _swap(self, kind: str, x: torch.Tensor, same_shape: bool = True) -> list[torch.Tensor]:
        values = self._board.swap(self.rank, (kind, x.clone()))
        assert {name for name, _ in values} == {kind}
        assert not same_shape or len({(t.shape, t.dtype) for _, t in values}) == 1
        return [t for _, t in values]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._swap("reduce", x)).sum(0).to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._swap("gather", x), dim)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._swap("broadcast", x)[0])

    def smallest(self, number: int) -> int:
        return min(int(t) for t in self._swap("smallest", torch.tensor(number)))

    def start_gather(self, x_CX: torch.Tensor) -> Flight:
        return Flight(self.all_gather(x_CX))

    def start_exchange(self, x_RX: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Flight:
        assert len(sent) == len(received) == self.size and sum(sent) == len(x_RX)
        if x_RX.is_floating_point():
            self.sent_rows.append(sum(sent) - sent[self.rank])
        parts = list(x_RX.clone().split(list(sent)))
        everyone = self._board.swap(self.rank, parts)
        mine = [theirs[self.rank] for theirs in everyone]
        assert [len(part) for part in mine] == list(received)
        return Flight(torch.cat(mine))


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` returns on every rank; the first error of any."""
    board = _Board(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(board, rank, size))
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [f.result() for f in futures]
