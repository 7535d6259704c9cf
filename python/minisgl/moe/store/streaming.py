"""TransientSlots: slots that all layers share, through which a prompt's experts travel without touching any layer's cache.

A long prompt needs nearly every expert of every layer once. Sent through the caches it would evict what decoding requests use;
here each expert passes through the next free slot, and when a layer has nothing left to send, the next layer's experts follow,
so that the link stays busy while the rest of the layer computes:

    link      layer 3: e7 e9 e12 … | layer 4: e0 e1 e2 …
    compute        layer 3: wave, wave, …, attention of layer 4 | layer 4: wave, …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """A copy that was started: whose expert, and into which slot."""

    owner: Owner
    expert: int
    slot: int


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

    def serve(
        self,
        owner: Owner,
        experts: Sequence[int],
        following: tuple[Owner, Sequence[int]] | None = None,
    ) -> Iterator[dict[int, int]]:
        """Waves {expert: slot} that together hold each of `owner`'s `experts` once. A wave's slots are its own until the next
        is asked for, and complete for whatever is launched meanwhile.

        following: the layer after this one and the experts it will probably need: they follow when these are on their way.
        """
        ready = deque(self._arrived(owner, experts))
        on_their_way = {travelling.expert for travelling in ready}
        waiting = deque((owner, expert) for expert in experts if expert not in on_their_way)
        after = deque((following[0], expert) for expert in following[1]) if following else deque()
        try:
            while ready or waiting:
                self._start(waiting, ready)
                if not waiting:
                    self._start(after, self._ahead)
                wave = [ready.popleft() for _ in range(min(self.wave_size, len(ready)))]
                yield from self._hand_out(wave)
            self._start(after, self._ahead)
        finally:  # a step that ends in the middle gives its slots back; later copies into them come after those under way
            self._free.extend(travelling.slot for travelling in ready)

    def _arrived(self, owner: Owner, experts: Sequence[int]) -> list[Travelling]:
        """What was started ahead for this layer and is needed; the slots of everything else started ahead are free again."""
        wanted, useful = set(experts), []
        while self._ahead:
            travelling = self._ahead.popleft()
            if travelling.owner is owner and travelling.expert in wanted:
                useful.append(travelling)
            else:
                self._free.append(travelling.slot)
        return useful

    def _start(self, waiting: deque[tuple[Owner, int]], started: deque[Travelling]) -> None:
        while waiting and self._free:
            (owner, expert), slot = waiting.popleft(), self._free.popleft()
            self._copies.start(slot, owner.records_EB[expert], pinned=True)
            owner.num_streamed += 1
            started.append(Travelling(owner, expert, slot))

    def _hand_out(self, wave: Sequence[Travelling]) -> Iterator[dict[int, int]]:
        slots = [travelling.slot for travelling in wave]
        self._copies.wait(slots)
        try:
            yield {travelling.expert: travelling.slot for travelling in wave}
        finally:
            self._copies.release(slots)
            self._free.extend(slots)
