"""Which experts a step uses, counted beside a plain loop."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.store.routes import Use, slots_of_routes, used_experts

NUM_EXPERTS = 6


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda k: st.lists(st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=k, max_size=k))
    )
)
def test_used_experts_are_those_of_a_loop(rows: list[list[int]]) -> None:
    found: dict[int, Use] = {}
    for token, experts in enumerate(rows):
        for expert in experts:
            if expert >= 0:
                found[expert] = Use(expert, token, found[expert].times + 1 if expert in found else 1)
    ids_TK = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), len(rows[0]) if rows else 1)
    expected = sorted(found.values(), key=lambda use: (use.last_token, use.expert))
    assert used_experts(ids_TK, NUM_EXPERTS) == expected


def test_routes_without_a_slot_are_not_here() -> None:
    ids_TK = torch.tensor([[0, 3], [-1, 5]], dtype=torch.int32)
    assert slots_of_routes(ids_TK, {3: 7, 5: 0}, NUM_EXPERTS).tolist() == [[-1, 7], [-1, 0]]
