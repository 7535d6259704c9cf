"""Align, router and reduce in Triton's interpreter against their plain definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.base import RoutingRule, apply_rule
from minisgl.moe.fused import FusedMoeBackend, align_torch, moe_align_block_size
from minisgl.moe.kernels import launch

WALKTHROUGH_IDS = torch.tensor([[4, 3], [6, 1], [1, 7], [6, 4], [5, 4]])


def test_align_walkthrough():
    sorted_ids, expert_ids = moe_align_block_size(WALKTHROUGH_IDS, 4, 8)
    expected = [3, 4, 10, 10, 1, 10, 10, 10, 0, 7, 9, 10, 8, 10, 10, 10, 2, 6, 10, 10, 5, 10, 10, 10]
    assert sorted_ids.tolist() == expected
    assert expert_ids.tolist() == [1, 3, 4, 5, 6, 7]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_align_equals_its_twin(data):
    num_experts = data.draw(st.sampled_from([1, 5, 33]))
    ids = data.draw(st.lists(st.integers(-1, num_experts - 1), min_size=0, max_size=70))
    block_m = data.draw(st.sampled_from([1, 4, 16, 64]))
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    for actual, expected in zip(
        moe_align_block_size(topk_ids, block_m, num_experts),
        align_torch(topk_ids, block_m, num_experts),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("num_experts", [257, 300])
def test_align_many_experts_and_more_routes_than_a_chunk(num_experts):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (2500,), generator=generator).int() * (num_experts // 3)
    sorted_ids, expert_ids = moe_align_block_size(ids, 16, num_experts)
    expected = align_torch(ids, 16, num_experts)
    assert torch.equal(sorted_ids, expected[0])
    assert torch.equal(expert_ids, expected[1])


@pytest.mark.parametrize("ids", [[0, 8], [-2, 1], [15, 0]])
def test_align_refuses_ids_out_of_range(ids):
    with pytest.raises(ValueError, match="allowed"):
        moe_align_block_size(torch.tensor([ids]), 16, 8)


def test_align_refuses_odd_blocks():
    with pytest.raises(ValueError, match="power of two"):
        moe_align_block_size(WALKTHROUGH_IDS, 12, 8)


RULES = [
    RoutingRule(2),
    RoutingRule(2, renormalize=False),
    RoutingRule(8),
    RoutingRule(6, scoring="sigmoid", scaling_factor=2.5),
    RoutingRule(3, scoring="softmax_of_topk", renormalize=False),
    RoutingRule(1),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num_experts", [8, 60, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [False, True])
def test_router_equals_the_definition(rule, num_experts, bias, rank, monkeypatch):
    monkeypatch.setattr(launch, "RANK_MAX_EXPERTS", 512)
    monkeypatch.setattr(launch, "RANK_MAX_TOKENS", 64 if rank else 0)
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(4, num_experts, generator=generator) * 3
    bias_E = torch.randn(num_experts, generator=generator) if bias else None
    num_valid = torch.tensor([3], dtype=torch.int32)
    actual = FusedMoeBackend().route(logits, rule, bias_E, num_valid)
    expected = apply_rule(logits, rule, bias_E, num_valid)
    assert torch.equal(actual.ids_TK, expected.ids_TK)
    torch.testing.assert_close(actual.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
@pytest.mark.parametrize("rank", [False, True])
def test_router_on_what_no_logit_should_be(scoring, rank, monkeypatch):
    monkeypatch.setattr(launch, "RANK_MAX_TOKENS", 64 if rank else 0)
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [
            [nan] * 6,
            [inf, 0, inf, 1, 2, 3],
            [-inf] * 6,
            [0.5] * 6,
            [nan, 1, -inf, inf, 1, 0],
            [2, 1, 1, 1, 1, 0],
        ]
    )
    rule = RoutingRule(3, scoring=scoring)
    actual, expected = FusedMoeBackend().route(logits, rule), apply_rule(logits, rule)
    assert torch.equal(actual.ids_TK, expected.ids_TK)
    assert bool(actual.weights_TK.isfinite().all())
    torch.testing.assert_close(actual.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-7)


def test_router_with_groups_follows_the_definition():
    rule = RoutingRule(4, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2")
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    actual, expected = FusedMoeBackend().route(logits, rule), apply_rule(logits, rule)
    assert torch.equal(actual.ids_TK, expected.ids_TK)


def test_router_without_tokens():
    routing = FusedMoeBackend().route(torch.empty(0, 8), RoutingRule(2))
    assert routing.ids_TK.shape == routing.weights_TK.shape == (0, 2)


@pytest.mark.parametrize(("num_tokens", "top_k", "model_dim"), [(1, 1, 32), (3, 6, 192), (2, 8, 2880)])
def test_reduce_is_a_sum_in_ascending_order(num_tokens, top_k, model_dim):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(num_tokens * top_k, model_dim, generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    served = torch.rand(num_tokens * top_k, generator=generator) > 0.3
    rows[~served] = float("nan")
    y = torch.full((num_tokens, model_dim), float("nan"))

    class OnlyServed:
        served_R = served.to(torch.int8)

    launch.reduce(rows, weights, OnlyServed(), y)
    expected = torch.zeros_like(y, dtype=torch.float64)
    for k in range(top_k):
        here = served.view(num_tokens, top_k)[:, k, None]
        row = rows.view(num_tokens, top_k, -1)[:, k]
        expected += torch.where(here, row.double() * weights[:, k, None].double(), 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
