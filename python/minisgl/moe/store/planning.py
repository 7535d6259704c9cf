"""SlotTable: which expert is in which slot of one layer, and which slot to give up next. Plain Python, no tensors.

It is the planner of the staged store, and the definition of the place kernel of the device store (`place_step`): a test
drives both through random histories and compares every number.

What to give up is decided by the scores of `eviction.py`: the slot whose expert was used longest ago (`lru`), among equals
the one used least often (`lfu`), among those the lowest slot. On real routing LRU beats every static choice at every size;
frequency only helps tiny caches, where the experts of one step all have the same stamp.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from minisgl.eviction import Entry, History, ScoreFn, lfu, lru

EMPTY = -1
NEVER = -1  # stamp of an expert that no step has used: such a slot goes first
MAX_TOKENS = 64  # of a step that the device plans; larger ones are prompts
MAX_WAVES = 4  # of such a step: a wave that turns out to be empty still costs its launches


def num_waves(num_tokens: int, top_k: int, num_experts: int, num_slots: int) -> int:
    """Waves that serve so many tokens, whatever they route to."""
    return max(1, -(-min(num_tokens * top_k, num_experts) // num_slots))


def graph_holds(num_tokens: int, top_k: int, num_experts: int, num_slots: int) -> bool:
    """Whether the device plans a step of so many tokens, so that a CUDA graph can hold it."""
    return num_tokens <= MAX_TOKENS and num_waves(num_tokens, top_k, num_experts, num_slots) <= MAX_WAVES


@dataclass(frozen=True)
class Load:
    """Copy `expert` into `slot`, which so far held `evicted` (EMPTY: nothing)."""

    expert: int
    slot: int
    evicted: int


class SlotTable:
    """slot_of_E and expert_of_S are inverse to each other; EMPTY where there is none."""

    def __init__(self, num_experts: int, num_slots: int, scores: Sequence[ScoreFn] = (lru, lfu)) -> None:
        """scores: what orders victims, the first one first; see `eviction.SCORES`."""
        assert 1 <= num_slots <= num_experts
        self.slot_of_E = [EMPTY] * num_experts
        self.expert_of_S = [EMPTY] * num_slots
        self.scores = tuple(scores)
        self._entry_E = [_entry(NEVER, 0)] * num_experts

    @property
    def num_slots(self) -> int:
        return len(self.expert_of_S)

    def last_use(self, expert: int) -> int:
        """Stamp of the latest use, NEVER before the first."""
        return int(self._entry_E[expert].last_use)

    def num_uses(self, expert: int) -> int:
        return self._entry_E[expert].num_uses

    def use(self, expert: int, now: int, times: int = 1) -> None:
        """`expert` is used `times` times at `now`, wherever it is."""
        self._entry_E[expert] = _entry(now, self.num_uses(expert) + times)

    def victims(self, count: int, keep: Collection[int] = ()) -> list[int]:
        """The `count` slots to give up first, none of `keep`: empty ones, then those with the lowest scores."""
        slots = (slot for slot in range(self.num_slots) if slot not in keep)
        return heapq.nsmallest(count, slots, key=self._rank)

    def load(self, expert: int, slot: int) -> Load:
        """Give `slot` to `expert`, which must be in none."""
        assert self.slot_of_E[expert] == EMPTY
        evicted = self.expert_of_S[slot]
        if evicted != EMPTY:
            self.slot_of_E[evicted] = EMPTY
        self.expert_of_S[slot], self.slot_of_E[expert] = expert, slot
        return Load(expert, slot, evicted)

    def fill(self, experts: Sequence[int], keep: Collection[int] = ()) -> list[Load]:
        """Give each of `experts`, at most as many as there are slots outside of `keep`, the next victim's slot."""
        slots = self.victims(len(experts), keep)
        assert len(slots) == len(experts)
        return [self.load(expert, slot) for expert, slot in zip(experts, slots)]

    def check(self) -> None:
        """Assert that the two maps are inverse to each other."""
        for slot, expert in enumerate(self.expert_of_S):
            assert expert == EMPTY or self.slot_of_E[expert] == slot
        assert sum(slot != EMPTY for slot in self.slot_of_E) == sum(e != EMPTY for e in self.expert_of_S)

    def _rank(self, slot: int) -> tuple[float, ...]:
        expert = self.expert_of_S[slot]
        if expert == EMPTY:
            return (float("-inf"),) * len(self.scores) + (slot,)
        return (*(score(self._entry_E[expert], 0.0) for score in self.scores), slot)


def _entry(last_use: int, num_uses: int) -> Entry:
    """All experts of a layer cost the same to fetch, so cost and size are one; heat is not kept."""
    return Entry(History(num_uses, (last_use,), float("-inf"), 0.0), cost=1.0, num_bytes=1)


@dataclass(frozen=True)
class Wave:
    """What one launch of the place kernel decides: experts served from where they were, and experts to fetch first."""

    hits: tuple[int, ...]
    loads: tuple[Load, ...]


def place_step(table: SlotTable, counts: Mapping[int, int], now: int) -> list[Wave]:
    """The waves of one step, which uses expert e counts[e] times at time `now`: the definition of the place kernel.

    The first wave serves every expert that has a slot and, in ascending order of experts, as many of the others as there are
    slots left. Each later wave serves as many of the rest as there are slots, whatever these hold: its experts were served
    already. There are as many waves as it takes, at least one.
    """
    for expert, times in counts.items():
        table.use(expert, now, times)
    hits = tuple(expert for expert in sorted(counts) if table.slot_of_E[expert] != EMPTY)
    rest = [expert for expert in sorted(counts) if table.slot_of_E[expert] == EMPTY]
    room = table.num_slots - len(hits)
    waves = [Wave(hits, tuple(table.fill(rest[:room], keep={table.slot_of_E[e] for e in hits})))]
    for start in range(room, len(rest), table.num_slots):
        waves.append(Wave((), tuple(table.fill(rest[start : start + table.num_slots]))))
    return waves
