"""Which experts a step uses, counted beside a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.store import routes
from minisgl.moe.store.routes import Use, look, slots_of_routes, slots_of_waves, used_experts

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


@pytest.mark.parametrize("few_ids", [0, 100])
def test_what_a_prompt_needs_is_told_in_one_copy(few_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever ids are counted."""
    monkeypatch.setattr(routes, "FEW_IDS", few_ids)
    ids_TK = torch.tensor([[0, 3], [-1, 5], [3, -1]], dtype=torch.int32)
    state = (torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([4], dtype=torch.int32))
    for num_last, last in ((1, {3}), (2, {3, 5}), (4, {0, 3, 5})):
        found = look(ids_TK, NUM_EXPERTS, num_last, state)
        assert (found.used, found.state, found.last) == ([0, 3, 5], [[7, 8, 9], [4]], last)
    waves = [{3: 2}, {}, {0: 1, 5: 0}]
    slots_WE, slots_WR = slots_of_waves(found, waves, NUM_EXPERTS, torch.device("cpu"))
    assert slots_WE.tolist() == [[wave.get(expert, -1) for expert in range(NUM_EXPERTS)] for wave in waves]
    assert slots_WR.tolist() == [
        [wave.get(expert, -1) for expert in ids_TK.flatten().tolist()] for wave in waves
    ]
