"""Transient slots: every expert once, in few copies, whatever was started ahead and whoever stopped in the middle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.base import ExpertShape, Slab
from minisgl.moe.formats import get_format
from minisgl.moe.store.streaming import TransientSlots
from tests.unit.moe.late_copies import LateCopies

E, SHAPE, FORMAT = 32, ExpertShape(4, 4), get_format("none", torch.float32)


class Counting(LateCopies):
    """Also counts calls."""

    def __init__(self, slab_SB: torch.Tensor) -> None:
        super().__init__(slab_SB)
        self.num_calls = 0

    def start(self, slot: int, records_NB: torch.Tensor, pinned: bool) -> None:
        self.num_calls += 1
        super().start(slot, records_NB, pinned)


def make(num_slots: int) -> TransientSlots:
    layout = FORMAT.layout(SHAPE)
    records = torch.zeros((1, layout.nbytes), dtype=torch.uint8)
    return TransientSlots(Slab.of_records(FORMAT.name, SHAPE, layout, records), num_slots, Counting)


def make_owner(seed: int) -> Any:
    nbytes = FORMAT.layout(SHAPE).nbytes
    records_EB = torch.arange(E, dtype=torch.uint8)[:, None] + 32 * seed
    return SimpleNamespace(records_EB=records_EB.expand(E, nbytes).contiguous(), num_streamed=0)


def check_waves(slots: TransientSlots, owner: Any, experts: list[int], stop: int, following: Any) -> None:
    served: list[int] = []
    waves = slots.serve(slots.plan(owner, experts), following)
    for index, wave in enumerate(waves):
        if index == stop:
            waves.close()
            return
        for expert, slot in wave.slot_of.items():
            assert torch.equal(slots.slab.records_SB[slot], owner.records_EB[expert])
        served += wave.slot_of
    assert sorted(served) == experts


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_expert_is_served_once(data: st.DataObject) -> None:
    slots = make(data.draw(st.integers(1, 9), "slots"))
    owners = [make_owner(seed) for seed in range(3)]
    subsets = st.lists(st.integers(0, E - 1), unique=True).map(sorted)
    for _ in range(data.draw(st.integers(1, 6), "layers")):
        owner, other = data.draw(st.permutations(owners), "whose")[:2]
        following = (other, data.draw(subsets, "ahead")) if data.draw(st.booleans()) else None
        stop = data.draw(st.sampled_from([99, 99, 0, 1]), "ends in wave")
        check_waves(slots, owner, data.draw(subsets, "experts"), stop, following)


def test_a_plan_that_comes_to_nothing_costs_no_slots() -> None:
    slots, (one, two) = make(4), (make_owner(0), make_owner(1))
    check_waves(slots, one, [0, 1], 99, (two, [3, 4]))
    slots.plan(two, [3, 4, 5])
    for _ in range(3):
        check_waves(slots, one, list(range(E)), 99, (two, [3, 4]))


@pytest.mark.parametrize("lacking", [0, 3])
def test_neighbours_travel_together(lacking: int) -> None:
    """Also after waves of which the next layer did not need all: 32 experts through 8 slots are two copies a wave and one
    for each gap, not 32."""
    slots, owners = make(8), [make_owner(seed) for seed in range(2)]
    for index in range(10):
        copies: Any = slots._copies
        before = copies.num_calls
        experts = [expert for expert in range(E) if (expert + index) % 11 >= lacking]
        check_waves(slots, owners[index % 2], experts, 99, (owners[1 - index % 2], list(range(E))))
        assert copies.num_calls - before <= 2 * 8 + 3 * lacking
