"""The pure planning rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl.scheduler.planning import may_admit, share_budget


def test_decodes_first_then_prompts_in_order() -> None:
    assert share_budget([20, 1, 5, 1, 0], 16) == [14, 1, 0, 1, 0]
    assert share_budget([3, 1, 50], 16) == [3, 1, 12]


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_budget_is_kept_and_used(counts: list[int], budget: int) -> None:
    shares = share_budget(counts, budget)
    decodes = sum(1 for c in counts if c == 1)
    assert all(0 <= s <= c for s, c in zip(shares, counts))
    assert sum(shares) == max(min(budget, sum(counts)), min(decodes, sum(counts)))


def test_admission_leaves_a_page_for_everyone_running() -> None:
    assert may_admit(8, 10, 2)
    assert not may_admit(9, 10, 2)
    assert may_admit(11, 10, 0)
