"""Kernels of early fetching against their definition in plain Python, number by number, through random histories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.store import device_plan as device_plan_module
from minisgl.moe.store import early as early_module
from minisgl.moe.store.device_plan import EARLY_WORDS, DevicePlan
from minisgl.moe.store.early import IN_FLIGHT, EarlySlots, num_early_slots
from minisgl.moe.store.planning import EMPTY, SlotTable, place_step
from tests.interpret.moe.test_place_kernel import check_told, counted, random_ids

CHUNKS = 3
WORDS = CHUNKS * EARLY_WORDS - 96  # the last chunk is not whole


class Pair:
    """One layer's cache twice: as the kernels have it, with records and slab, and as its definition has it."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.num_experts = num_experts
        num_early = num_early_slots(num_experts, num_slots, asked=True)
        self.plan = DevicePlan(num_experts, num_slots, torch.device("cpu"), num_early, 8 * WORDS)
        self.table, self.early = SlotTable(num_experts, num_slots), EarlySlots(num_slots, num_early, CHUNKS)
        self.plain = SlotTable(num_experts, num_slots)
        self.records_EB = torch.randint(0, 255, (num_experts, 8 * WORDS), dtype=torch.uint8)
        self.slab_SB = torch.full((num_slots + num_early, 8 * WORDS), 0xFF, dtype=torch.uint8)
        self.now = 0

    def guess(self, ids_TK: torch.Tensor, most: int) -> None:
        """Both list it, and `most` chunks come."""
        fetches = self.early.plan(ids_TK.T.flatten().tolist(), self.table)
        self.plan.plan_early(ids_TK)
        listed = [row[:2] + row[3:4] for row in self.plan.early.listed_AF.tolist() if row[0] != EMPTY]
        assert listed == [[f.expert, f.place, f.chunks] for f in fetches]
        self.plan.fetch_early(self.records_EB, self.slab_SB, most)
        self.early.arrive(most)

    def step(self, ids_TK: torch.Tensor, first_only: bool = False) -> None:
        self.now += 1
        waves = place_step(self.table, counted(ids_TK), self.now)
        place_step(self.plain, counted(ids_TK), self.now)
        for index in range(1 if first_only else self.plan.num_waves(*ids_TK.shape)):
            hits_TK, misses_TK = self.plan.place(ids_TK, first=index == 0)
            loads = waves[index].loads if index < len(waves) else ()
            if index == 0:
                complete, left = self.early.take(loads)
                expected = [(f.expert, f.place, f.chunks) for f in left]
            else:
                complete, places = [], self.early.place_of_S
                expected = [(load.expert, places[load.slot], 0) for load in loads]
            assert self._fetches() == expected
            self.plan.fetch(self.records_EB, self.slab_SB)
            in_slot = {*(waves[index].hits if index < len(waves) else ()), *complete}
            for expert, hit, miss in zip(*(t.flatten().tolist() for t in (ids_TK, hits_TK, misses_TK))):
                assert (hit >= 0) == (expert in in_slot)
                assert (miss >= 0) == (expert in {e for e, _, _ in expected})
                for place in {hit, miss} - {-1}:
                    assert torch.equal(self.slab_SB[place], self.records_EB[expert]), (
                        "complete when it is read"
                    )
        if not first_only:
            self._check()

    def step_jointly(self, ids_TK: torch.Tensor, cut: int) -> None:
        """As `step`, planned for kernels that wait."""
        self.now += 1
        (wave,) = place_step(self.table, counted(ids_TK), self.now)
        place_step(self.plain, counted(ids_TK), self.now)
        places_TK, turns_TK = self.plan.place_jointly(ids_TK, ahead=True)
        _, left = self.early.take(wave.loads)
        assert self._fetches() == [(f.expert, f.place, f.chunks) for f in left]
        check_told(self.plan, ids_TK, places_TK, turns_TK)
        turn_of = {f.expert: turn for turn, f in enumerate(left)}
        chunks, programs = self.plan.fetch_in_turn(self.records_EB, self.slab_SB, cut)
        arrived = [len(left) * chunks[1] + programs, *[chunks[0]] * len(left)]
        assert self.plan.arrived_S1.tolist()[: len(arrived)] == arrived
        for expert, place, turn in zip(*(t.flatten().tolist() for t in (ids_TK, places_TK, turns_TK))):
            assert turn == turn_of.get(expert, -1)
            assert (place >= 0) == (expert >= 0)
            assert expert < 0 or torch.equal(self.slab_SB[place], self.records_EB[expert])
        self._check()

    def _fetches(self) -> list[tuple[int, int, int]]:
        plan, count = self.plan, int(self.plan.num_fetch)
        columns = (plan.fetch_experts_S, plan.fetch_slots_S, plan.fetch_chunks_S)
        return list(zip(*(column[:count].tolist() for column in columns)))

    def _check(self) -> None:
        plan, early = self.plan, self.early
        assert plan.slot_of_E.tolist() == self.table.slot_of_E == self.plain.slot_of_E, "no guess evicts"
        assert plan.expert_of_S.tolist() == self.table.expert_of_S
        assert plan.early.place_of_S.tolist() == early.place_of_S
        assert sorted(early.place_of_S) == list(range(len(self.slab_SB)))
        if early.expert_of_A:
            assert plan.early.expert_of_A.tolist() == early.expert_of_A
            assert plan.early.chunks_of_A.tolist() == early.chunks_of_A
            counters = plan.counters.tolist()
            assert counters[3:6] == [early.plans, early.copied, early.useful]
            assert bool(counters[8]) == early.off
        for expert, slot in enumerate(self.table.slot_of_E):
            if slot != EMPTY:
                assert torch.equal(self.slab_SB[early.place_of_S[slot]], self.records_EB[expert])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_equal_to_the_definition_after_any_history(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([4, 7, 16]), "experts")
    num_slots = data.draw(st.integers(1, num_experts - 1), "slots")
    top_k = data.draw(st.integers(1, min(num_experts, 4)), "top-k")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    pair = Pair(num_experts, num_slots)
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        num_tokens = data.draw(st.sampled_from([1, 1, 2, 4]), "tokens")
        padding = data.draw(st.integers(0, num_tokens), "padding")
        ids_TK = random_ids(num_experts, num_tokens, top_k, padding)
        kind = data.draw(st.sampled_from(["right", "right", "wrong", "none"]), "guess")
        guess_TK = ids_TK if kind == "right" else random_ids(num_experts, num_tokens, top_k, padding)
        if kind != "none":
            pair.guess(guess_TK, data.draw(st.integers(0, 2 * CHUNKS), "chunks that come"))
        if pair.plan.joins(*ids_TK.shape) and data.draw(st.booleans(), "jointly"):
            pair.step_jointly(ids_TK, cut=8 * 32 * data.draw(st.integers(1, WORDS // 32 - 1), "cut"))
        else:
            pair.step(ids_TK)


def test_a_right_guess_saves_what_has_come() -> None:
    pair = Pair(num_experts=8, num_slots=4)
    ids_TK = torch.tensor([[5, 6]], dtype=torch.int32)
    pair.guess(ids_TK, most=CHUNKS + 1)
    pair.step(ids_TK)
    assert pair.early.useful == CHUNKS + 1
    assert pair.plan.counters[:3].tolist() == [1, 1, 0], "5 was there, two chunks of 6 were missing"
    assert pair._fetches() == [(6, pair.early.place_of_S[1], 1)]


def test_what_was_not_needed_stays_until_another_guess_needs_its_slot() -> None:
    pair = Pair(num_experts=8, num_slots=2)
    pair.guess(torch.tensor([[5, 6]], dtype=torch.int32), most=2 * CHUNKS)
    pair.step(torch.tensor([[0, 1]], dtype=torch.int32))
    assert pair.early.expert_of_A == [5, 6]
    pair.guess(torch.tensor([[7, 6]], dtype=torch.int32), most=CHUNKS)
    assert pair.early.expert_of_A == [7, 6]
    pair.step(torch.tensor([[6, 0]], dtype=torch.int32))
    assert pair.early.expert_of_A == [7, EMPTY]


def test_the_copy_stops_when_the_layer_begins() -> None:
    pair = Pair(num_experts=8, num_slots=4)
    ids_TK = torch.tensor([[5, 6]], dtype=torch.int32)
    pair.plan.plan_early(ids_TK)
    pair.plan.place(ids_TK, first=True)
    pair.plan.fetch_early(pair.records_EB, pair.slab_SB)
    assert (pair.slab_SB == 0xFF).all(), "too late: nothing is copied"


def test_a_chunk_that_lands_late_harms_nobody() -> None:
    """Copied, but not reported yet when the layer begins: it is fetched again, with the same bytes."""
    pair = Pair(num_experts=8, num_slots=4)
    ids_TK = torch.tensor([[5, 6]], dtype=torch.int32)
    pair.guess(ids_TK, most=CHUNKS)
    pair.plan.early.progress_N[0] = 0
    pair.early.expert_of_A, pair.early.chunks_of_A = [5, 6], [0, 0]
    pair.early.copied = 0
    pair.step(ids_TK)


@pytest.mark.parametrize("right", [True, False])
def test_guesses_that_do_not_pay_end(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    monkeypatch.setattr(early_module, "WINDOW", 3)
    monkeypatch.setattr(device_plan_module, "WINDOW", 3)
    monkeypatch.setattr(early_module, "IN_FLIGHT", 1)
    monkeypatch.setattr(device_plan_module, "IN_FLIGHT", 1)
    pair = Pair(num_experts=16, num_slots=2)
    for now in range(5):
        routed, other = ([[now, now + 1]], [[now + 8, now + 9]])
        pair.guess(torch.tensor(routed if right else other, dtype=torch.int32), most=CHUNKS)
        pair.step(torch.tensor(routed, dtype=torch.int32))
    assert pair.early.off == (not right)
    assert (pair.early.plans == 3) == (not right)


def test_early_slots_never_outnumber_what_the_cache_lacks() -> None:
    assert [num_early_slots(8, slots, True) for slots in (1, 6, 7, 8)] == [2, 2, 1, 0]
    assert num_early_slots(8, 1, False) == 0
    assert IN_FLIGHT & (IN_FLIGHT - 1) == 0, "programs are a power of two"
