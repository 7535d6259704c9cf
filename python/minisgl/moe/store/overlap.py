"""Overlap: how the fetches of a layer that the device plans share the device with the computation of its hits.

Where a kernel may start before the one ahead has ended, and the kernels that compute can wait by themselves:

main     place, fetch, all routes: those whose record is on its way wait for it | attention of the next layer | place
second                                                              fetch early, until the next layer's place
third                 router of the next layer, list of what to fetch early

Elsewhere:

main     place | hits | missed routes | attention of the next layer          | place
second          fetch gate_up, down   | fetch early, until the next layer's place
third           router of the next layer, list of what to fetch early
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from minisgl.moe.store.copies import recorded


class Overlap(Protocol):
    """How fetches and the computation of hits share the device. prefetches: whether guesses get the link when it is idle.
    by_events: whether `join` waits for an event of each fetch, so that one may start while the one before it drains.
    in_turn: whether one launch may fetch everything ahead of a launch that computes everything and waits by itself.
    """

    prefetches: bool
    by_events: bool
    in_turn: bool

    def begin(self, fetches: Sequence[Callable[[], None]]) -> None:
        """Launch the fetches one after the other, and after everything launched so far."""
        ...

    def join(self, count: int) -> None:
        """What is launched from now on comes after the first `count` fetches."""
        ...

    def follow(self, prepare: Callable[[], None], fetch: Callable[[], None]) -> None:
        """Launch `prepare` beside everything launched since `begin`, and `fetch` behind it and all that was launched so far."""
        ...

    def end(self) -> None:
        """What is launched from now on comes after all fetches and what was prepared, but not after what follows them. May be
        said later than by the layer that began, before the next `begin`."""
        ...


class Serial:
    """One stream: the fetches, then the hits. For a CPU, and for comparison."""

    by_events = False

    def __init__(self, prefetches: bool = False, in_turn: bool = False) -> None:
        self.prefetches, self.in_turn = prefetches, in_turn

    def begin(self, fetches: Sequence[Callable[[], None]]) -> None:
        for fetch in fetches:
            fetch()

    def join(self, count: int) -> None:
        pass

    def follow(self, prepare: Callable[[], None], fetch: Callable[[], None]) -> None:
        prepare()
        fetch()

    def end(self) -> None:
        pass


class Forked:
    """A second stream, forked before the hits and joined after them; a CUDA graph captures it as a branch. What is prepared
    has a third one.
    """

    by_events = True

    def __init__(self, device: torch.device, prefetches: bool = False) -> None:
        self.prefetches, self.in_turn = prefetches, torch.cuda.get_device_capability(device) >= (9, 0)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._aside = torch.cuda.Stream(device) if prefetches else self._stream
        self._begun: torch.cuda.Event | None = None
        self._done: list[torch.cuda.Event] = []
        self._prepare: Callable[[], None] | None = None

    def begin(self, fetches: Sequence[Callable[[], None]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._begun, self._done = recorded(self._stream), []
        with torch.cuda.stream(self._stream):
            for fetch in fetches:
                fetch()
                self._done.append(recorded(self._stream))

    def join(self, count: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done[count - 1])

    def follow(self, prepare: Callable[[], None], fetch: Callable[[], None]) -> None:
        assert self._begun is not None
        self._prepare = prepare  # keeps its tensors: their memory is the main stream's, which may go on before they were read
        self._aside.wait_event(self._begun)  # and so after whatever followed the fetches of an earlier layer
        with torch.cuda.stream(self._aside):
            prepare()
            prepared = recorded(self._aside)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(prepared)
            fetch()
        self._done.append(prepared)

    def end(self) -> None:
        for event in self._done:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._done = []
