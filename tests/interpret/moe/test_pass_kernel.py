"""The kernel that plans prompts which pass by, against its definition in plain Python, number by number."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.store.device_plan import DevicePlan
from minisgl.moe.store.passing import plan_passing
from minisgl.moe.store.planning import SlotTable
from minisgl.moe.store.prompts import pass_step

CPU = torch.device("cpu")


def random_ids(num_experts: int, num_tokens: int, top_k: int, share_of_none: float) -> torch.Tensor:
    ids_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    return torch.where(torch.rand(ids_TK.shape) < share_of_none, -1, ids_TK)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_equal_to_the_definition_whatever_the_slots_hold(data: st.DataObject) -> None:
    """900 routes are more than a program of the kernel has."""
    num_experts = data.draw(st.sampled_from([4, 7, 16, 40]), "experts")
    num_slots = data.draw(st.integers(1, num_experts), "slots")
    top_k = data.draw(st.integers(1, min(num_experts, 4)), "top-k")
    num_tokens = data.draw(st.sampled_from([1, 2, 5, 300]), "tokens")
    num_last = data.draw(st.integers(1, min(num_tokens, 4)), "last tokens")
    size = data.draw(st.integers(1, 9), "a wave")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    plan, table = DevicePlan(num_experts, num_slots, CPU), SlotTable(num_experts, num_slots)
    plan.early.place_of_S.copy_(torch.randperm(num_slots))
    for slot, expert in enumerate(
        torch.randperm(num_experts)[: data.draw(st.integers(0, num_slots))].tolist()
    ):
        table.load(expert, slot)
    plan.slot_of_E.copy_(torch.tensor(table.slot_of_E))
    plan.counters += 5
    ids_TK = random_ids(num_experts, num_tokens, top_k, data.draw(st.sampled_from([0.0, 0.3, 1.0])))

    passing = plan_passing(plan, ids_TK, num_last, size)

    hits, waves = pass_step(table, ids_TK.unique().tolist(), ids_TK[-num_last:].unique().tolist(), size)
    place_of = [{expert: int(plan.early.place_of_S[table.slot_of_E[expert]]) for expert in hits}]
    place_of += [
        {e: slot for slot, e in enumerate(waves[w])} if w < len(waves) else {}
        for w in range(len(passing.waves))
    ]
    assert len(waves) <= len(passing.waves)
    for listed, wave in zip(passing.waves, [*waves, *[[]] * len(passing.waves)]):
        count = int(listed.num_fetch[0])
        assert list(zip(listed.experts_X[:count].tolist(), listed.slots_X[:count].tolist())) == [
            (e, slot) for slot, e in enumerate(wave)
        ]
    for places_TK, places_E, expected in zip(passing.places_WTK, passing.places_WE, place_of):
        assert places_TK.flatten().tolist() == [expected.get(e, -1) for e in ids_TK.flatten().tolist()]
        assert places_E.tolist() == [expected.get(e, -1) for e in range(num_experts)]
    served = (passing.places_WTK >= 0).sum(0)
    assert torch.equal(served, (ids_TK >= 0).long()), "every route once"
    assert plan.counters.tolist() == [5 + len(hits), 5 + sum(map(len, waves)), 5]
    assert plan.slot_of_E.tolist() == table.slot_of_E, "the cache is as it was"
