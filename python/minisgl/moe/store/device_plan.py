"""DevicePlan: the state of one layer's expert cache in device memory, and the kernels that work on it.

The host launches and never looks; who does, by `.tolist()` of a tensor, waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from minisgl.moe.kernels.early import EARLY_SLOTS, FIELDS, fetch_early_kernel, plan_early_kernel
from minisgl.moe.kernels.fetch import fetch_kernel
from minisgl.moe.kernels.launch import has_dependent_launch, pdl_options
from minisgl.moe.kernels.place import place_kernel
from minisgl.moe.kernels.place_few import place_few_kernel
from minisgl.moe.store.early import COST, IN_FLIGHT, WINDOW
from minisgl.moe.store.planning import num_waves
from minisgl.moe.workspace import next_power_of_two

FETCH_PROGRAMS = 16  # thread blocks that read host memory: 8 reach 50.3 GB/s of PCIe 5 x16, 16 reach 51.0
FETCH_WORDS = 1024  # int64 words one has under way: with 32 KiB instead of 8 a kernel beside it takes 65 us instead of 21
COPY_PROGRAMS, COPY_WORDS = 128, 4096  # of a copy within device memory
EARLY_WORDS = (
    512  # of a chunk that comes early, one a program: what is under way when demand begins must land first
)
CHUNK_BYTES = 8 * EARLY_WORDS
FEW_ROUTES, FEW_SLOTS = 32, 128  # what one program compares with each other without spilling, and words hold
MOST_EXPERTS = 2**14 - 1  # that words can name
NUM_COUNTERS, NUM_EARLY_COUNTERS = (
    3,
    10,
)  # hits, misses, evictions; with early slots also those of `kernels.early`


class Listed(NamedTuple):
    """What to fetch: experts and places, int32 [X], and how many of them, int32 [1]."""

    experts_X: torch.Tensor
    slots_X: torch.Tensor
    num_fetch: torch.Tensor


class EarlyPlan:
    """State of one layer's A early slots: `store.early.EarlySlots` in device memory."""

    def __init__(self, num_experts: int, num_slots: int, num_early: int, device: torch.device) -> None:
        def ints(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int32, device=device)

        assert num_early <= EARLY_SLOTS.value, "the planning kernel lists no more"
        self.num_slots, self.num_early = num_slots, num_early
        self.place_of_S = torch.arange(num_slots + num_early, dtype=torch.int32, device=device)
        self.expert_of_A, self.chunks_of_A = ints(max(num_early, 1), value=-1), ints(max(num_early, 1))
        self.listed_AF, self.listing = ints(max(num_early, 1), FIELDS.value, value=-1), ints(2, value=-1)
        self.progress_N, self.scratch_3E = ints(IN_FLIGHT), ints(3, num_experts)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Those of the place kernels, in their order."""
        maps = (self.place_of_S, self.expert_of_A, self.chunks_of_A)
        return (*maps, self.listed_AF, self.listing, self.progress_N)


class DevicePlan:
    """Maps, stamps and counters of E experts and S slots; what they mean says `kernels.place`, and of A early slots behind them
    `kernels.early`. record_bytes: of an expert, needed with early slots.
    """

    def __init__(
        self,
        num_experts: int,
        num_slots: int,
        device: torch.device,
        num_early: int = 0,
        record_bytes: int = 0,
    ) -> None:
        self.num_experts, self.num_slots = num_experts, num_slots
        self.early = EarlyPlan(num_experts, num_slots, num_early, device)
        self.num_chunks = -(-record_bytes // CHUNK_BYTES)
        assert not num_early or self.num_chunks

        def ints(size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self.slot_of_E, self.expert_of_S = ints(num_experts, -1), ints(num_slots, -1)
        self.last_use_E, self.uses_E, self.clock = ints(num_experts), ints(num_experts), ints(1)
        self.fetch_experts_S, self.fetch_slots_S, self.num_fetch = ints(num_slots), ints(num_slots), ints(1)
        self.fetch_chunks_S, self.arrived_S1 = ints(num_slots), ints(num_slots + 1)
        self.told_3M = ints(3 * FEW_ROUTES).view(3, FEW_ROUTES)
        self.counters = ints(NUM_EARLY_COUNTERS if num_early else NUM_COUNTERS, dtype=torch.int64)
        self._kind_E, self._scores_S = ints(num_experts), ints(num_slots, dtype=torch.int64)

    def where(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `place_of_E` needs on the host: slot_of_E int32 [E], and the place in the slab of each slot, int32 [S + A]."""
        return self.slot_of_E, self.early.place_of_S

    @staticmethod
    def place_of_E(slot_of_E: Sequence[int], place_of_S: Sequence[int]) -> list[int]:
        """Where in the slab each expert is, -1: nowhere."""
        return [place_of_S[slot] if slot >= 0 else slot for slot in slot_of_E]

    @contextlib.contextmanager
    def promised(self) -> Iterator[None]:
        """Around a `place` and the launch of its fetches: if one is not launched (an interrupt between the two, say), the maps
        promise experts that never come, so they forget all of them.
        """
        try:
            yield
        except BaseException:
            self.slot_of_E.fill_(-1)
            self.expert_of_S.fill_(-1)
            raise

    def num_waves(self, num_tokens: int, top_k: int) -> int:
        """Waves that serve so many tokens, whatever they route to."""
        return num_waves(num_tokens, top_k, self.num_experts, self.num_slots)

    def joins(self, num_tokens: int, top_k: int) -> bool:
        """Whether `place_jointly` can plan a step of so many tokens: few routes, which one wave serves."""
        few = num_tokens * top_k <= min(FEW_ROUTES, self.num_slots) and self.num_experts < MOST_EXPERTS
        return few and self.num_slots + self.early.num_early < FEW_SLOTS

    def place(
        self, ids_TK: torch.Tensor, first: bool, count: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan the next wave of a step: (hit slots, miss slots), int32 [T, K] each; see `place_kernel`.

        ids_TK: int32, contiguous. first: whether it is the step's first wave. count: False leaves the counters alone.
        """
        if self.joins(*ids_TK.shape) and not self.early.num_early:
            return self._place_few(ids_TK, count, joint=False, ahead=False)
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
            self.fetch_chunks_S,
            self.num_fetch,
            self.counters,
            *self.early.arguments(),
            self.early.scratch_3E,
            ids_TK.numel(),
            E=self.num_experts,
            S=self.num_slots,
            A=self.early.num_early,
            N=IN_FLIGHT,
            CHUNKS=self.num_chunks,
            FIRST=first,
            COUNT=count,
            EXPERTS=max(next_power_of_two(self.num_experts + 1), 32),
            SLOTS=max(next_power_of_two(self.num_slots), 16),
            CHUNK=min(max(next_power_of_two(ids_TK.numel()), 32), 512),
            num_warps=4,
        )
        return hit_slots_TK, miss_slots_TK

    def place_jointly(self, ids_TK: torch.Tensor, ahead: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan a whole step: (slots, turns of the fetches that routes wait for, -1 for none), int32 [T, K] each.

        ahead: read the state before the kernel launched just before has ended. That must not be one that writes it.
        """
        return self._place_few(ids_TK, count=True, joint=True, ahead=ahead)

    def _place_few(
        self, ids_TK: torch.Tensor, count: bool, joint: bool, ahead: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots_TK, others_TK = torch.empty_like(ids_TK), torch.empty_like(ids_TK)
        slots, routes = (
            max(next_power_of_two(self.num_slots + 1), 16),
            max(next_power_of_two(ids_TK.numel()), 8),
        )
        place_few_kernel[(1,)](
            ids_TK,
            slots_TK,
            others_TK,
            self.slot_of_E,
            self.expert_of_S,
            self.last_use_E,
            self.uses_E,
            self.clock,
            self.fetch_experts_S,
            self.fetch_slots_S,
            self.fetch_chunks_S,
            self.num_fetch,
            self.arrived_S1,
            self.told_3M,
            self.counters,
            *self.early.arguments(),
            ids_TK.numel(),
            S=self.num_slots,
            A=self.early.num_early,
            N=IN_FLIGHT,
            CHUNKS=self.num_chunks,
            JOINT=joint,
            COUNT=count,
            AHEAD=ahead,
            ROUTES=routes,
            SLOTS=slots,
            MOST=FEW_ROUTES,
            num_warps=max(slots // 16 if slots > 32 else 1, routes * slots // 512),
            **pdl_options(ids_TK.device),
        )
        return slots_TK, others_TK

    def plan_early(self, ids_TK: torch.Tensor) -> None:
        """List what to fetch early for a routing that is a guess: ids_TK int32 [T, K], the likeliest first."""
        early, (num_tokens, top_k) = self.early, ids_TK.shape
        plan_early_kernel[(1,)](
            ids_TK,
            self.slot_of_E,
            early.place_of_S,
            early.expert_of_A,
            early.chunks_of_A,
            self.clock,
            self.counters,
            early.listed_AF,
            early.listing,
            early.progress_N,
            num_tokens,
            K=top_k,
            S=self.num_slots,
            A=early.num_early,
            N=IN_FLIGHT,
            CHUNKS=self.num_chunks,
            WINDOW=WINDOW,
            COST=COST * IN_FLIGHT,
            ROUTES=max(next_power_of_two(ids_TK.numel()), 16),
            num_warps=1,
        )

    def fetch_early(self, records_EB: torch.Tensor, slab_SB: torch.Tensor, most: int = 2**30) -> None:
        """Copy what `plan_early` listed, at most so many chunks, until the next `place` begins."""
        early = self.early
        fetch_early_kernel[(IN_FLIGHT,)](
            records_EB.view(torch.int64),
            slab_SB.view(torch.int64),
            early.listed_AF,
            early.listing,
            self.clock,
            early.progress_N,
            A=early.num_early,
            N=IN_FLIGHT,
            WORDS=slab_SB.shape[1] // 8,
            CHUNK=EARLY_WORDS,
            MOST=most,
            num_warps=4,
        )

    def fetch(
        self,
        records_EB: torch.Tensor,
        slab_SB: torch.Tensor,
        begin: int = 0,
        end: int | None = None,
        ahead: bool = False,
    ) -> None:
        """Copy what the latest `place` listed into its slots, or only bytes begin .. end - 1 of each record.

        records_EB: uint8 [E, nbytes], pinned where the slab is on a CUDA device. begin, end: multiples of 8.
        ahead: start while the fetch before this one drains; whatever needs both must then wait for both.
        """
        end = slab_SB.shape[1] if end is None else end
        # Every fetch lets the next one start; whether it does is up to that one.
        dependent = pdl_options(slab_SB.device) if ahead else {"PDL": has_dependent_launch(slab_SB.device)}
        self._fetch(records_EB, slab_SB, (begin, end, end), **dependent)

    def fetch_in_turn(
        self, records_EB: torch.Tensor, slab_SB: torch.Tensor, cut: int
    ) -> tuple[tuple[int, int], int]:
        """Copy what the latest `place_jointly` listed into its slots, first all bytes before `cut`, a multiple of 8, and count
        what has come in `arrived_S1`. To be launched directly behind it, and before whatever waits for it.

        Returns how many chunks a record has before and after the cut, and how many programs plan and copy.
        """
        ends = (0, cut, slab_SB.shape[1])
        block, programs = self._fetch(records_EB, slab_SB, ends, counts=True, **pdl_options(slab_SB.device))
        return (-(-cut // block), -(-(ends[2] - cut) // block)), programs + 1

    def fetch_passing(self, records_EB: torch.Tensor, transient_XB: torch.Tensor, listed: Listed) -> None:
        """Copy a wave of `passing.plan_passing` into its transient slots."""
        end = transient_XB.shape[1]
        self._fetch(
            records_EB,
            transient_XB,
            (0, end, end),
            listed=listed,
            PDL=has_dependent_launch(transient_XB.device),
        )

    def fetch_some(self, records_XB: torch.Tensor, place_of_E: torch.Tensor, slab_SB: torch.Tensor) -> None:
        """Of what the latest `place` listed, copy what records_XB holds: expert e at place_of_E[e], int32 [E], unless -1."""
        end = slab_SB.shape[1]
        self._fetch(records_XB, slab_SB, (0, end, end), place_of_E, PDL=has_dependent_launch(slab_SB.device))

    def _fetch(
        self,
        records_EB: torch.Tensor,
        slab_SB: torch.Tensor,
        ends: tuple[int, int, int],
        place_of_E: torch.Tensor | None = None,
        counts: bool = False,
        listed: Listed | None = None,
        **dependent: bool,
    ) -> tuple[int, int]:
        """ends: begin, cut and end in bytes; see `fetch_kernel`. listed: what to copy, None for what the latest `place` listed.
        Returns bytes a chunk, and programs."""
        begin, cut, end = (e // 8 for e in ends)
        some, early = place_of_E is not None, self.early.num_early > 0 and listed is None
        experts_X, slots_X, num_fetch = listed or (self.fetch_experts_S, self.fetch_slots_S, self.num_fetch)
        programs, words = (COPY_PROGRAMS, COPY_WORDS) if some else (FETCH_PROGRAMS, FETCH_WORDS)
        block = min(words, next_power_of_two(max(cut - begin, end - cut)))
        programs = min(programs, len(experts_X) * -(-(end - begin) // block))
        fetch_kernel[(programs,)](
            records_EB.view(torch.int64),
            self.slot_of_E if place_of_E is None else place_of_E,
            slab_SB.view(torch.int64),
            experts_X,
            slots_X,
            self.fetch_chunks_S,
            num_fetch,
            self.told_3M,
            self.arrived_S1,
            WORDS=slab_SB.shape[1] // 8,
            BEGIN=begin,
            CUT=cut,
            END=end,
            COUNTS=counts,
            SOME=some,
            EARLY=EARLY_WORDS * early,
            BLOCK=block,
            MOST=FEW_ROUTES,
            num_warps=8,
            **dependent,
        )
        return 8 * block, programs
