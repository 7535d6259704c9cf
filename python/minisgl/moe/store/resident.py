"""ResidentStore: every expert in device memory. S = E, slot = expert, one wave. The default and the simplest
store.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minisgl.moe.base import ExpertShape, Placement, Routing, Slab
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store.base import CacheCounters, CacheView, StoreBytes
from minisgl.moe.store.records import ExpertRecords


class ResidentStore(ExpertRecords):
    """The records are the slab."""

    def __init__(
        self, num_experts: int, shape: ExpertShape, weight_format: ExpertFormat, device: torch.device | str
    ) -> None:
        super().__init__(num_experts, shape, weight_format, device)
        self.device = self.records_EB.device
        self.slab = Slab(weight_format.name, shape, self.layout, self.records_EB, self.parts)

    @property
    def num_slots(self) -> int:
        return self.num_experts

    def place(self, routing: Routing, awaits: bool = False, may_wait: bool = False) -> Iterable[Placement]:
        yield Placement(self.slab, routing.ids_TK)

    def bytes(self) -> StoreBytes:
        return StoreBytes(device=self.records_EB.nbytes)

    def graph_safe(self, num_tokens: int) -> bool:
        return True

    def counters(self) -> CacheCounters | None:
        return None

    def view(self) -> CacheView | None:
        return None
