"""The place kernel against its definition in plain Python, number by number, through random histories; and the fetch kernel."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.store.device_plan import DevicePlan
from minisgl.moe.store.planning import Load, SlotTable, place_step


def counted(ids_TK: torch.Tensor) -> Counter[int]:
    return Counter(ids_TK[ids_TK >= 0].tolist())


def random_ids(num_experts: int, num_tokens: int, top_k: int, padding: int) -> torch.Tensor:
    rows = [torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]
    ids_TK = torch.stack(rows).int()
    ids_TK[num_tokens - padding :] = -1
    return ids_TK


def fetched(plan: DevicePlan) -> list[tuple[int, int]]:
    count = int(plan.num_fetch)
    return list(zip(plan.fetch_experts_S[:count].tolist(), plan.fetch_slots_S[:count].tolist()))


def check_step(plan: DevicePlan, table: SlotTable, ids_TK: torch.Tensor, now: int) -> None:
    """One step through both; every wave and the state after it must be equal."""
    before = plan.counters.tolist()
    waves = place_step(table, counted(ids_TK), now)
    num_waves = plan.num_waves(*ids_TK.shape)
    assert len(waves) <= num_waves
    served = torch.zeros_like(ids_TK)
    hits = misses = evictions = 0
    for index in range(num_waves):
        hit_slots_TK, miss_slots_TK = plan.place(ids_TK, first=index == 0)
        loads: tuple[Load, ...] = waves[index].loads if index < len(waves) else ()
        assert fetched(plan) == [(load.expert, load.slot) for load in loads]
        in_slot = set(waves[index].hits) if index < len(waves) else set()
        slot_of = {load.expert: load.slot for load in loads}
        for expert, hit, miss in zip(*(t.flatten().tolist() for t in (ids_TK, hit_slots_TK, miss_slots_TK))):
            assert (hit >= 0) == (expert in in_slot)
            assert miss == slot_of.get(expert, -1)
            assert hit < 0 or hit not in slot_of.values()
        served += (hit_slots_TK >= 0).int() + (miss_slots_TK >= 0).int()
        hits, misses = hits + len(in_slot), misses + len(loads)
        evictions += sum(load.evicted >= 0 for load in loads)
    assert torch.equal(served, (ids_TK >= 0).int()), "every route once"
    assert plan.slot_of_E.tolist() == table.slot_of_E
    assert plan.expert_of_S.tolist() == table.expert_of_S
    stamps = [max(table.last_use(e), 0) for e in range(len(table.slot_of_E))]
    assert plan.last_use_E.tolist() == stamps
    assert plan.uses_E.tolist() == [table.num_uses(e) for e in range(len(table.slot_of_E))]
    assert plan.counters.tolist() == [before[0] + hits, before[1] + misses, before[2] + evictions]
    table.check()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_equal_to_the_definition_after_any_history(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([4, 7, 16, 40]), "experts")
    num_slots = data.draw(st.integers(1, num_experts), "slots")
    top_k = data.draw(st.integers(1, min(num_experts, 4)), "top-k")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    plan, table = DevicePlan(num_experts, num_slots, torch.device("cpu")), SlotTable(num_experts, num_slots)
    for now in range(1, data.draw(st.integers(1, 6), "steps") + 1):
        num_tokens = data.draw(st.sampled_from([1, 1, 2, 5]), "tokens")
        padding = data.draw(st.integers(0, num_tokens), "padding")
        check_step(plan, table, random_ids(num_experts, num_tokens, top_k, padding), now)


def check_joint_step(plan: DevicePlan, table: SlotTable, ids_TK: torch.Tensor, now: int) -> None:
    """A step that is planned for kernels which wait: a slot for every route, and the turn of its fetch."""
    plan.arrived_S1.fill_(99)
    (wave,) = place_step(table, counted(ids_TK), now)
    slots_TK, turns_TK = plan.place_jointly(ids_TK, ahead=True)
    assert fetched(plan) == [(load.expert, load.slot) for load in wave.loads]
    turn_of = {load.expert: turn for turn, load in enumerate(wave.loads)}
    expected = [table.slot_of_E[expert] if expert >= 0 else -1 for expert in ids_TK.flatten().tolist()]
    assert slots_TK.flatten().tolist() == expected
    assert turns_TK.flatten().tolist() == [turn_of.get(expert, -1) for expert in ids_TK.flatten().tolist()]
    assert plan.expert_of_S.tolist() == table.expert_of_S
    assert plan.arrived_S1.tolist() == [1, *[0] * len(table.expert_of_S)], (
        "the program that planned has ended"
    )
    check_told(plan, ids_TK, slots_TK, turns_TK)


def check_told(
    plan: DevicePlan, ids_TK: torch.Tensor, places_TK: torch.Tensor, turns_TK: torch.Tensor
) -> None:
    """What the kernels behind the place kernel are told is what it writes down, as `kernels.told` says."""
    count, (routes, fetches, parts) = int(plan.num_fetch), plan.told_3M.tolist()
    rows = zip(*(t.flatten().tolist() for t in (ids_TK, places_TK, turns_TK)))
    expected = [
        place + 1 + (turn + 1) * 256 + count * 65536 if e >= 0 else -1 - count for e, place, turn in rows
    ]
    assert routes == expected + [0] * (len(routes) - len(expected))
    expected = [expert + 1 + place * 2**14 + count * 2**24 for expert, place in fetched(plan)] or [-1]
    assert fetches == expected + [0] * (len(fetches) - len(expected))
    chunks = [n + 1 for n in plan.fetch_chunks_S[:count].tolist()] if plan.early.num_early else []
    assert parts == chunks + [0] * (len(parts) - len(chunks))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_joint_steps_are_equal_to_the_definition(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([8, 24]), "experts")
    num_slots = data.draw(st.integers(4, num_experts), "slots")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    plan = DevicePlan(num_experts, num_slots, torch.device("cpu"))
    table = SlotTable(num_experts, num_slots)
    for now in range(1, data.draw(st.integers(1, 6), "steps") + 1):
        num_tokens = data.draw(st.integers(1, num_slots // 4), "tokens")
        assert plan.joins(num_tokens, 4)
        padding = data.draw(st.integers(0, num_tokens), "padding")
        check_joint_step(plan, table, random_ids(num_experts, num_tokens, 4, padding), now)


def test_fetches_in_turn_are_counted() -> None:
    """Chunks of gate_up by turn, of down together, and the bytes of both."""
    plan, cut = DevicePlan(6, 4, torch.device("cpu")), 8 * (2 * 1024 + 32)
    records_EB = torch.randint(0, 255, (6, 8 * (3 * 1024 + 64)), dtype=torch.uint8)
    slab_SB = torch.full((4, records_EB.shape[1]), 0xFF, dtype=torch.uint8)
    for ids, turns in (([5, 2, -1], [1, 0, -1]), ([2, 3, 5], [-1, 0, -1])):
        slots_TK, turns_TK = plan.place_jointly(torch.tensor([ids], dtype=torch.int32), ahead=False)
        chunks, programs = plan.fetch_in_turn(records_EB, slab_SB, cut)
        assert (chunks, programs) == ((3, 2), 17)
        assert turns_TK.tolist() == [turns]
        count = 1 + max(turns)
        assert plan.arrived_S1.tolist()[: 1 + count] == [count * chunks[1] + programs] + [chunks[0]] * count
        for expert, slot in zip(ids, slots_TK[0].tolist()):
            assert expert < 0 or torch.equal(slab_SB[slot], records_EB[expert])


def test_many_routes_and_experts() -> None:
    plan, table = DevicePlan(128, 49, torch.device("cpu")), SlotTable(128, 49)
    for now, num_tokens in enumerate([1, 64, 8, 1], start=1):
        check_step(plan, table, random_ids(128, num_tokens, 8, padding=num_tokens // 4), now)


def test_uncounted_steps_leave_the_counters_alone() -> None:
    plan = DevicePlan(8, 4, torch.device("cpu"))
    plan.place(torch.tensor([[0, 1]], dtype=torch.int32), first=True, count=False)
    assert plan.counters.tolist() == [0, 0, 0]
    assert fetched(plan) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("num_words", [32, 96, 4096 + 64])
def test_fetch_copies_exactly_the_listed_records(num_words: int) -> None:
    plan = DevicePlan(6, 4, torch.device("cpu"))
    records_EB = torch.randint(0, 255, (6, 8 * num_words), dtype=torch.uint8)
    slab_SB = torch.full((4, 8 * num_words), 0xFF, dtype=torch.uint8)
    plan.place(torch.tensor([[5, 2, 3]], dtype=torch.int32), first=True)
    plan.fetch(records_EB, slab_SB)
    for expert, slot in fetched(plan):
        assert torch.equal(slab_SB[slot], records_EB[expert])
    assert (slab_SB[3] == 0xFF).all()
    plan.place(torch.tensor([[5, 2, 3]], dtype=torch.int32), first=True)
    slab_SB.fill_(7)
    plan.fetch(records_EB, slab_SB)
    assert (slab_SB == 7).all(), "hits are not fetched again"


def test_fetch_some_takes_only_what_is_at_hand() -> None:
    plan = DevicePlan(6, 4, torch.device("cpu"))
    some_XB = torch.arange(1, 4, dtype=torch.uint8)[:, None].expand(3, 256).contiguous()
    slab_SB = torch.zeros((4, 256), dtype=torch.uint8)
    place_of_E = torch.tensor([0, 2, -1, 0, -1, -1], dtype=torch.int32)
    plan.place(torch.tensor([[1, 2, 3]], dtype=torch.int32), first=True)
    plan.fetch_some(some_XB, place_of_E, slab_SB)
    values = {expert: int(slab_SB[slot, 0]) for expert, slot in fetched(plan)}
    assert values == {1: 3, 2: 0, 3: 1}
