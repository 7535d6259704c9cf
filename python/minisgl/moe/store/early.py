"""EarlySlots: slots beside a layer's cache that only prefetching fills, and when prefetching stops. Plain Python, no tensors.

    layer l      its router's neighbour guesses what layer l + 1 will route to; what that layer lacks begins to travel, chunk by
                 chunk, behind everything that layer l itself must fetch
    layer l + 1  has routed: the copy stops where it is. A guess that was right needs only the rest of its record, or nothing

A cache never loses an expert to a guess: it holds at every moment what it would hold without. When it loads an expert that is
in an early slot, it does not copy it: that slot becomes the cache's, and the victim's slot an early one. So `place_of_S` says
where a slot's record really is. These are the definition of the kernels in `kernels/early.py` and of what `kernels/place.py`
does with them; a test drives both through random histories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.moe.store.planning import EMPTY, Load, SlotTable

MAX_EARLY_TOKENS = 4  # of a step with guesses: with more, misses keep the link busy anyway
MAX_EARLY_SLOTS = 2  # a layer: while the next layer's attention runs, little more than one record travels
WINDOW = 64  # guesses after which a layer's prefetching is judged
IN_FLIGHT = 32  # chunks under way at a time, which is how much of a copy nobody can stop
COST = 2  # times as much is what a guess costs, see `EarlySlots._judge`


def num_early_slots(num_experts: int, num_slots: int, asked: bool) -> int:
    """Early slots beside so many of the cache: together at most one an expert."""
    return min(MAX_EARLY_SLOTS, num_experts - num_slots) if asked else 0


@dataclass(frozen=True)
class Fetch:
    """Copy `expert` to `place`, where the first `chunks` of its record are already."""

    expert: int
    place: int
    chunks: int


class EarlySlots:
    """A early slots behind the S of a table.

    place_of_S [S + A]: place in the slab of every slot, first those of the cache. expert_of_A, chunks_of_A: whose record an
    early slot has, EMPTY for none, and how many of its num_chunks chunks are complete. copied, useful: chunks that came early,
    and those of them that a layer then needed. plans: lists of guesses that were not empty. off: it does not pay here.
    """

    def __init__(self, num_slots: int, num_early: int, num_chunks: int) -> None:
        self.place_of_S = list(range(num_slots + num_early))
        self.expert_of_A, self.chunks_of_A = [EMPTY] * num_early, [0] * num_early
        self.copied = self.useful = self.plans = 0
        self.off = False
        self._num_slots, self._num_chunks = num_slots, num_chunks
        self._listed: list[int] = []
        self._judged = (0, 0)

    def plan(self, guessed: Sequence[int], table: SlotTable) -> list[Fetch]:
        """What to begin to copy: the first of `guessed`, likeliest first, that no slot of the cache holds. An expert that is in
        an early slot keeps it and what has come of its record; the others share the remaining early slots in order.
        """
        self._judge()
        self._listed = []
        if self.off:
            return []
        lacking = [e for e in dict.fromkeys(guessed) if e != EMPTY and table.slot_of_E[e] == EMPTY]
        wanted = lacking[: len(self.expert_of_A)]
        free = [index for index, expert in enumerate(self.expert_of_A) if expert not in wanted]
        for expert in wanted:
            if expert not in self.expert_of_A:
                index = free.pop(0)
                self.expert_of_A[index], self.chunks_of_A[index] = expert, 0
            self._listed.append(self.expert_of_A.index(expert))
        fetches = [
            Fetch(self.expert_of_A[index], self.place_of_S[self._num_slots + index], self.chunks_of_A[index])
            for index in self._listed
        ]
        self.plans += any(fetch.chunks < self._num_chunks for fetch in fetches)
        return fetches

    def arrive(self, num_chunks: int) -> None:
        """The first num_chunks chunks of what `plan` listed, one record after the other, are where they belong."""
        for index in self._listed:
            came = min(num_chunks, self._num_chunks - self.chunks_of_A[index])
            self.chunks_of_A[index] += came
            self.copied += came
            num_chunks -= came
        self._listed = []

    def take(self, loads: Sequence[Load]) -> tuple[list[int], list[Fetch]]:
        """(experts that are complete, what is left to copy) of a step's first wave, whose slots `loads` gave away. Exchanges
        slots with those that came early; ends the latest list.
        """
        self._listed = []
        complete, fetches = [], []
        for load in loads:
            chunks = 0
            if load.expert in self.expert_of_A:
                chunks = self._exchange(load.slot, self.expert_of_A.index(load.expert))
            if chunks == self._num_chunks:
                complete.append(load.expert)
            else:
                fetches.append(Fetch(load.expert, self.place_of_S[load.slot], chunks))
        return complete, fetches

    def _exchange(self, slot: int, index: int) -> int:
        chunks, early = self.chunks_of_A[index], self._num_slots + index
        if chunks:
            places = self.place_of_S
            places[slot], places[early] = places[early], places[slot]
            self.expert_of_A[index], self.chunks_of_A[index] = EMPTY, 0
            self.useful += chunks
        return chunks

    def _judge(self) -> None:
        """A useful chunk saves its own time on the link. A guess costs a layer's own misses the wait for what is in flight, and
        what else happens on its account about as much again.
        """
        plans, useful = self.plans - self._judged[0], self.useful - self._judged[1]
        if plans >= WINDOW:
            self.off = self.off or useful < plans * IN_FLIGHT * COST
            self._judged = (self.plans, self.useful)
