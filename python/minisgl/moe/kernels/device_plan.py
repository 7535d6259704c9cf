"""DevicePlan: the state of one layer's expert cache in device memory, and the two kernels that work on it.

The host launches and never looks; who does, by `.tolist()` of a tensor, waits for the device.
"""

from __future__ import annotations

import torch

from minisgl.moe.kernels.fetch import fetch_kernel
from minisgl.moe.kernels.launch import has_dependent_launch, pdl_options
from minisgl.moe.kernels.place import place_kernel
from minisgl.moe.store.planning import num_waves
from minisgl.moe.workspace import next_power_of_two

FETCH_PROGRAMS = 16  # thread blocks that read host memory: 8 reach 50.3 GB/s of PCIe 5 x16, 16 reach 51.0
COPY_PROGRAMS = 128  # that copy within device memory
FETCH_WORDS = 4096  # int64 words a block has in flight: 32 KiB


class DevicePlan:
    """Maps, stamps and counters of E experts and S slots; what they mean says `kernels.place`."""

    def __init__(self, num_experts: int, num_slots: int, device: torch.device) -> None:
        self.num_experts, self.num_slots = num_experts, num_slots

        def ints(size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self.slot_of_E, self.expert_of_S = ints(num_experts, -1), ints(num_slots, -1)
        self.last_use_E, self.uses_E, self.clock = ints(num_experts), ints(num_experts), ints(1)
        self.fetch_experts_S, self.fetch_slots_S, self.num_fetch = ints(num_slots), ints(num_slots), ints(1)
        self.counters = ints(3, dtype=torch.int64)
        self._kind_E, self._scores_S = ints(num_experts), ints(num_slots, dtype=torch.int64)

    def num_waves(self, num_tokens: int, top_k: int) -> int:
        """Waves that serve so many tokens, whatever they route to."""
        return num_waves(num_tokens, top_k, self.num_experts, self.num_slots)

    def place(
        self, ids_TK: torch.Tensor, first: bool, count: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan the next wave of a step: (hit slots, miss slots), int32 [T, K] each; see `place_kernel`.

        ids_TK: int32, contiguous. first: whether it is the step's first wave. count: False leaves the counters alone.
        """
        hit_slots_TK, miss_slots_TK = torch.empty_like(ids_TK), torch.empty_like(ids_TK)
        place_kernel[(1,)](
            ids_TK,
            hit_slots_TK,
            miss_slots_TK,
            self.slot_of_E,
            self.expert_of_S,
            self.last_use_E,
            self.uses_E,
            self.clock,
            self._kind_E,
            self._scores_S,
            self.fetch_experts_S,
            self.fetch_slots_S,
            self.num_fetch,
            self.counters,
            ids_TK.numel(),
            E=self.num_experts,
            S=self.num_slots,
            FIRST=first,
            COUNT=count,
            EXPERTS=max(next_power_of_two(self.num_experts + 1), 32),
            SLOTS=max(next_power_of_two(self.num_slots), 16),
            CHUNK=min(max(next_power_of_two(ids_TK.numel()), 32), 512),
            num_warps=4,
        )
        return hit_slots_TK, miss_slots_TK

    def fetch(
        self, records_EB: torch.Tensor, slab_SB: torch.Tensor, begin: int = 0, end: int | None = None
    ) -> None:
        """Copy what the latest `place` listed into its slots, or only bytes begin .. end - 1 of each record.

        records_EB: uint8 [E, nbytes], pinned where the slab is on a CUDA device. begin, end: multiples of 8.
        """
        part = (begin, slab_SB.shape[1] if end is None else end)
        self._fetch(records_EB, slab_SB, part, None, FETCH_PROGRAMS)

    def fetch_some(self, records_XB: torch.Tensor, place_of_E: torch.Tensor, slab_SB: torch.Tensor) -> None:
        """Of what the latest `place` listed, copy what records_XB holds: expert e at place_of_E[e], int32 [E], unless -1."""
        self._fetch(records_XB, slab_SB, (0, slab_SB.shape[1]), place_of_E, COPY_PROGRAMS)

    def _fetch(
        self,
        records_EB: torch.Tensor,
        slab_SB: torch.Tensor,
        part: tuple[int, int],
        place_of_E: torch.Tensor | None,
        programs: int,
    ) -> None:
        begin, end = part[0] // 8, part[1] // 8
        first = {
            "PDL": has_dependent_launch(slab_SB.device)
        }  # lets the second part start, and itself starts as always
        dependent = pdl_options(slab_SB.device) if begin else first
        block = min(FETCH_WORDS, next_power_of_two(end - begin))
        most = self.num_slots * -(-(end - begin) // block)
        fetch_kernel[(min(programs, most),)](
            records_EB.view(torch.int64),
            self.slot_of_E if place_of_E is None else place_of_E,
            slab_SB.view(torch.int64),
            self.fetch_experts_S,
            self.fetch_slots_S,
            self.num_fetch,
            WORDS=slab_SB.shape[1] // 8,
            BEGIN=begin,
            END=end,
            SOME=place_of_E is not None,
            BLOCK=block,
            num_warps=8,
            **dependent,
        )
