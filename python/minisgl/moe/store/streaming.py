"""TransientSlots: slots that all layers share, through which a prompt's experts travel without touching any layer's cache.

A long prompt needs nearly every expert of every layer once. Sent through the caches it would evict what decoding requests use;
here each expert passes through the next free slot, and when a layer has nothing left to send, the next layer's experts follow,
so that the link stays busy while the rest of the layer computes:

    link      layer 3: e7 e9 e12 … | layer 4: e0 e1 e2 …
    compute        layer 3: wave, wave, …, attention of layer 4 | layer 4: wave, …

Neighbours that go into neighbouring slots are one copy: launching a copy takes the host nearly as long as an expert travels.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from minisgl.moe.base import Slab
from minisgl.moe.store.copies import Copies


class Owner(Protocol):
    """A layer whose records travel. num_streamed: how many did so far."""

    records_EB: torch.Tensor
    num_streamed: int


@dataclass(frozen=True)
class Travelling:
    """A copy: whose expert, and into which slot. wanted: False if it was started ahead in vain."""

    owner: Owner
    expert: int
    slot: int
    wanted: bool = True


@dataclass(frozen=True)
class Wave:
    """Experts computed together, perhaps none, and the copies that are started before, mostly of later waves."""

    starts: tuple[Travelling, ...]
    travelling: tuple[Travelling, ...]

    @property
    def slot_of(self) -> dict[int, int]:
        """Slot of each of its experts."""
        return {one.expert: one.slot for one in self.travelling if one.wanted}


class TransientSlots:
    """X slots for the records of layers that have one layout. wave_size: experts computed together, half of the slots, so that
    the other half travels meanwhile.
    """

    def __init__(self, template: Slab, num_slots: int, copies: Callable[[torch.Tensor], Copies]) -> None:
        """template: a slab of the layers' format and shape, on their device."""
        records = template.records_SB
        slots_XB = torch.empty((num_slots, records.shape[1]), dtype=torch.uint8, device=records.device)
        self.slab = Slab.of_records(template.format, template.shape, template.layout, slots_XB)
        self.wave_size = max(1, num_slots // 2)
        self._copies = copies(slots_XB)
        self._free = deque(range(num_slots))
        self._ahead: deque[Travelling] = deque()
        self._unserved: list[int] = []  # slots of a plan's first waves, if it comes to nothing

    def plan(self, owner: Owner, experts: Sequence[int]) -> list[Wave]:
        """Waves that together hold each of `owner`'s `experts` once: first those that were started ahead. Nothing is started.
        They are to be served before anything else is planned, or not at all.
        """
        self._free.extend(self._unserved)
        ready = self._arrived(owner, experts)
        self._unserved = [travelling.slot for travelling in ready]
        there = {travelling.expert for travelling in ready if travelling.wanted}
        waiting = deque(expert for expert in experts if expert not in there)
        waves, free = [], deque(self._free)
        while ready or waiting:
            starts = [
                Travelling(owner, waiting.popleft(), free.popleft())
                for _ in range(min(len(waiting), len(free)))
            ]
            ready.extend(starts)
            wave = [ready.popleft() for _ in range(min(self.wave_size, len(ready)))]
            free.extend(travelling.slot for travelling in wave)
            waves.append(Wave(tuple(starts), tuple(wave)))
        return waves

    def serve(
        self, waves: Sequence[Wave], following: tuple[Owner, Sequence[int]] | None = None
    ) -> Iterator[Wave]:
        """The planned waves, also those without experts. A wave's slots are its own until the next is asked for, and complete
        for whatever is launched meanwhile.

        following: the layer after this one and the experts it will probably need: they follow when these are on their way.
        """
        self._unserved = []
        after = deque(following[1]) if following else deque()
        not_started = sum(len(wave.starts) for wave in waves)
        started = sum(len(wave.travelling) for wave in waves) - not_started
        taken = deque(travelling for wave in waves for travelling in wave.travelling)
        try:
            for wave in waves:
                self._start(wave.starts)
                started, not_started = started + len(wave.starts), not_started - len(wave.starts)
                if following and not not_started:
                    self._start_ahead(following[0], after)
                yield from self._hand_out(wave)
                started -= len(wave.travelling)
                for _ in wave.travelling:
                    taken.popleft()
            if following:
                self._start_ahead(following[0], after)
        finally:  # a step that ends in the middle gives its slots back; later copies into them come after those under way
            self._free.extend(taken.popleft().slot for _ in range(started))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """All slots to whoever fills them by other means: what is launched from now on finds them free, and later copies come
        after what is launched until then.
        """
        self._free.extend(self._unserved)
        self._unserved = []
        started = [travelling.slot for travelling in self._ahead]
        self._ahead.clear()
        self._copies.wait(started)
        self._free.extend(started)
        try:
            yield
        finally:
            self._copies.release(range(self.slab.num_slots))

    def _arrived(self, owner: Owner, experts: Sequence[int]) -> deque[Travelling]:
        """What was started ahead, for this layer or in vain: slots always become free in the order in which they were taken, so
        that neighbours stay neighbours.
        """
        needed, ahead = set(experts), self._ahead
        self._ahead = deque()
        return deque(replace(one, wanted=one.owner is owner and one.expert in needed) for one in ahead)

    def _start_ahead(self, owner: Owner, experts: deque[int]) -> None:
        count = min(len(experts), len(self._free))
        ahead = [Travelling(owner, experts.popleft(), self._free[index]) for index in range(count)]
        self._start(ahead)
        self._ahead.extend(ahead)

    def _start(self, travelling: Sequence[Travelling]) -> None:
        """Start copies into the first free slots."""
        for run in _runs(travelling):
            owner, expert = run[0].owner, run[0].expert
            self._copies.start(run[0].slot, owner.records_EB[expert : expert + len(run)], pinned=True)
            owner.num_streamed += len(run)
        for one in travelling:
            taken = self._free.popleft()
            assert taken == one.slot, "waves are served as they were planned"

    def _hand_out(self, wave: Wave) -> Iterator[Wave]:
        slots = [travelling.slot for travelling in wave.travelling]
        self._copies.wait(slots)
        try:
            yield wave
        except BaseException:
            self._copies.release(slots)
            raise
        self._copies.release(slots)
        self._free.extend(slots)


def _runs(travelling: Sequence[Travelling]) -> Iterator[list[Travelling]]:
    """Neighbouring experts that go into neighbouring slots, together."""
    run: list[Travelling] = []
    for one in travelling:
        if run and (one.expert, one.slot) != (run[-1].expert + 1, run[-1].slot + 1):
            yield run
            run = []
        run.append(one)
    if run:
        yield run
