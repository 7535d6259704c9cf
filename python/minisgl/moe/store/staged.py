"""StagedStore: experts in host memory, S slots a layer on the device, planned by the host. Works everywhere, CPU included.

For hosts that can't pin every expert, and for CPUs, where it is the plain version of the cache: only the records and their
order matter, so the output equals that of the resident store bit for bit, whatever the slots held before.

    step    experts that are in a slot           one wave, at once
            the others, `wave_size` at a time    a wave each, while the next one's records travel

Time is counted in tokens: a prompt's experts get the stamps of the last tokens that used them, and travel in that order, so
what stays in the slots is what the prompt's end used. The host must know the routing, so every layer waits for the device
once, and no CUDA graph can hold it; the device store is for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from minisgl.moe.base import ExpertShape, Placement, Routing, Slab
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store.base import CacheCounters, CacheView, StoreBytes
from minisgl.moe.store.copies import Copies
from minisgl.moe.store.pinned import HostRecords
from minisgl.moe.store.planning import EMPTY, SlotTable
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.store.routes import slots_of_routes, used_experts


class StagedStore(ExpertRecords):
    """The records are the only copy of the weights; slots hold copies of some of them."""

    def __init__(
        self,
        host: HostRecords,
        shape: ExpertShape,
        weight_format: ExpertFormat,
        num_slots: int,
        device: torch.device | str,
        copies: Callable[[torch.Tensor], Copies],
        wave_size: int = 8,
    ) -> None:
        """host: memory for the records of all experts. copies: given the slots, uint8 [S, nbytes], what copies into them.
        wave_size: missing experts computed together.
        """
        num_experts = len(host.records_EB)
        super().__init__(num_experts, shape, weight_format, device, host.records_EB)
        assert 1 <= num_slots <= num_experts
        assert wave_size >= 1
        self.device = torch.device(device)
        slots_SB = torch.empty((num_slots, self.layout.nbytes), dtype=torch.uint8, device=self.device)
        self.slab = Slab.of_records(weight_format.name, shape, self.layout, slots_SB)
        self._host, self._wave_size = host, min(wave_size, num_slots)
        self._copies = copies(slots_SB)
        self._table = SlotTable(num_experts, num_slots)
        self._now = 0
        self._counters = CacheCounters()

    @property
    def num_slots(self) -> int:
        return self.slab.num_slots

    def place(self, routing: Routing, awaits: bool = False, may_wait: bool = False) -> Iterable[Placement]:
        """Waves; see the module. Waits for the routing."""
        ids_TK = routing.ids_TK
        current, misses = self._use(ids_TK)
        chunks = [misses[i : i + self._wave_size] for i in range(0, len(misses), self._wave_size)]
        for chunk in [*chunks, []]:
            slots = [self._table.slot_of_E[expert] for expert in current]
            early = len(slots) + len(chunk) <= self.num_slots
            if early:
                self._load(chunk, keep=slots)
            if current:
                yield from self._wave(current, slots, ids_TK)
            if not early:
                self._load(chunk, keep=())
            current = chunk

    def bytes(self) -> StoreBytes:
        pinned = self._host.pinned_bytes
        return StoreBytes(self.slab.records_SB.nbytes, pinned, self.records_EB.nbytes - pinned)

    def graph_safe(self, num_tokens: int) -> bool:
        return False

    def counters(self) -> CacheCounters:
        return self._counters

    def view(self) -> CacheView:
        uses = [self._table.num_uses(expert) for expert in range(self.num_experts)]
        return CacheView(torch.tensor(uses), torch.tensor(self._table.slot_of_E) != EMPTY)

    def _use(self, ids_TK: torch.Tensor) -> tuple[list[int], list[int]]:
        """Stamp this step's experts. (those in a slot, the others), each in the order of the last token that uses it."""
        uses = used_experts(ids_TK, self.num_experts)
        for use in uses:
            self._table.use(use.expert, self._now + use.last_token, use.times)
        self._now += len(ids_TK)
        slot_of_E = self._table.slot_of_E
        hits = [use.expert for use in uses if slot_of_E[use.expert] != EMPTY]
        misses = [use.expert for use in uses if slot_of_E[use.expert] == EMPTY]
        self._counters += CacheCounters(hits=len(hits), misses=len(misses))
        return hits, misses

    def _load(self, experts: Sequence[int], keep: Sequence[int]) -> None:
        """Begin to copy experts into slots outside of `keep`. Nothing is planned ahead of it: a step that ends early, by an
        error in the middle, leaves a table that is true.
        """
        for load in self._table.fill(experts, keep):
            pinned = load.expert < self._host.num_pinned
            self._copies.start(load.slot, self.records_EB[load.expert : load.expert + 1], pinned)
            self._counters += CacheCounters(evictions=load.evicted != EMPTY, num_bytes=self.layout.nbytes)

    def _wave(
        self, experts: Sequence[int], slots: Sequence[int], ids_TK: torch.Tensor
    ) -> Iterator[Placement]:
        """One placement, for the routes of these experts alone; releases the slots however the consumer comes back."""
        slot_of = dict(zip(experts, slots))
        self._copies.wait(slots)
        try:
            yield Placement(self.slab, slots_of_routes(ids_TK, slot_of, self.num_experts))
        finally:
            self._copies.release(slots)
