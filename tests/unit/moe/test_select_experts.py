"""Every routing rule against plain Python arithmetic, and what must hold whatever the logits are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.base import RoutingRule, apply_rule, select_experts

RULES = {
    "softmax, renormalised (Qwen3, Mixtral)": RoutingRule(4),
    "softmax as it is (OLMoE)": RoutingRule(4, renormalize=False),
    "softmax of top-k (gpt-oss)": RoutingRule(4, "softmax_of_topk", renormalize=False),
    "sigmoid, scaled": RoutingRule(4, "sigmoid", scaling_factor=2.5),
    "sigmoid, top-2 groups, scaled (DeepSeek-V3)": RoutingRule(4, "sigmoid", True, 8, 3, "top2", 2.5),
    "softmax, max groups, scaled (DeepSeek-V2)": RoutingRule(4, "softmax", False, 8, 3, "max", 16.0),
}


def plain_python(
    logits: list[float], rule: RoutingRule, bias: list[float] | None
) -> tuple[list[int], list[float]]:
    """The rule for one token in Python floats, written from the models' papers."""
    exps = [math.exp(x - max(logits)) for x in logits]
    scores = {
        "softmax": [e / sum(exps) for e in exps],
        "sigmoid": [1 / (1 + math.exp(-x)) for x in logits],
        "softmax_of_topk": logits,
    }[rule.scoring]
    choice = [s + b for s, b in zip(scores, bias, strict=True)] if bias else list(scores)
    size = len(logits) // rule.num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(rule.num_groups)]
    worth = [sum(g[:2]) if rule.group_score == "top2" else g[0] for g in groups]
    best = sorted(range(rule.num_groups), key=lambda g: (-worth[g], g))[: rule.top_groups]
    allowed = [e for e in range(len(logits)) if e // size in best]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: rule.top_k]
    weights = [scores[e] for e in ids]
    if rule.scoring == "softmax_of_topk":
        weights = [math.exp(w) / sum(math.exp(v) for v in weights) for w in weights]
    if rule.renormalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return ids, [w * rule.scaling_factor for w in weights]


def test_walkthrough_numbers() -> None:
    torch.randn(5, 64)
    weights, ids = select_experts(torch.randn(5, 8), 2, True)
    assert ids.tolist() == [[4, 3], [6, 1], [1, 7], [6, 4], [5, 4]]
    expected = [[0.692, 0.308], [0.545, 0.455], [0.93, 0.07], [0.711, 0.289], [0.809, 0.191]]
    torch.testing.assert_close(weights, torch.tensor(expected), atol=5e-4, rtol=0)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_plain_python(name: str, with_bias: bool) -> None:
    rule = RULES[name]
    logits, bias = torch.randn(40, 32) * 3, torch.randn(32) * 0.3 if with_bias else None
    routing = apply_rule(logits, rule, bias)
    for token in range(40):
        ids, weights = plain_python(logits[token].tolist(), rule, bias.tolist() if with_bias else None)
        assert routing.ids_TK[token].tolist() == ids
        assert routing.weights_TK[token].tolist() == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize("num_experts", [1, 5, 60, 64, 100, 128, 160, 256, 257, 384, 512, 1030])
def test_any_number_of_experts(num_experts: int) -> None:
    logits = torch.randn(7, num_experts)
    logits[0] = torch.arange(num_experts) / num_experts  # the winners have the highest numbers
    for top_k in {k for k in (1, 2, 6, 8, 10, 16, num_experts) if k <= num_experts}:
        weights, ids = select_experts(logits, top_k, True)
        exact = logits.double().sort(dim=-1, descending=True).indices[:, :top_k]
        assert torch.equal(ids.long(), exact)
        torch.testing.assert_close(weights.sum(-1), torch.ones(7))
        assert ids[0].tolist() == list(range(num_experts - 1, num_experts - 1 - top_k, -1))


finite_or_not = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0])


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.lists(finite_or_not, min_size=16, max_size=16), min_size=1, max_size=3),
    name=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.none() | st.lists(finite_or_not, min_size=16, max_size=16),
)
def test_any_logits_give_valid_routes(
    logits: list[list[float]], name: str, dtype: torch.dtype, bias: list[float] | None
) -> None:
    rule = RULES[name]
    routing = apply_rule(
        torch.tensor(logits, dtype=dtype), rule, None if bias is None else torch.tensor(bias)
    )
    for ids in routing.ids_TK.tolist():
        assert len(set(ids)) == rule.top_k
        assert all(0 <= expert < 16 for expert in ids)
    assert bool(routing.weights_TK.isfinite().all())
    assert bool((routing.weights_TK >= 0).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 3e38, -3e38])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
def test_equal_logits_share_evenly(scoring: str, value: float) -> None:
    routing = apply_rule(torch.full((3, 8), value), RoutingRule(4, scoring))  # type: ignore[arg-type]
    assert routing.ids_TK.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(routing.weights_TK, torch.full((3, 4), 0.25))


def test_nan_loses_and_infinity_wins() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0, math.inf], [-math.inf, 2.0, math.nan, 1.0]])
    weights, ids = select_experts(logits, 2, True)
    assert ids.tolist() == [[3, 2], [1, 3]]
    assert weights[0].tolist() == [1.0, 0.0]


def test_ties_go_to_the_lower_index_every_time() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0]])
    for _ in range(20):
        assert select_experts(logits, 4, True)[1].tolist() == [[1, 5, 2, 3]]


def test_tied_groups_go_to_the_lower_index() -> None:
    rule = RoutingRule(2, "sigmoid", num_groups=4, top_groups=1, group_score="top2")
    assert apply_rule(torch.zeros(1, 8), rule).ids_TK.tolist() == [[0, 1]]


def test_low_precision_logits_are_chosen_as_in_float64() -> None:
    logits = (torch.randn(200, 128) * 1e-3).bfloat16()
    logits[:, :3] = torch.tensor([1.00e-6, 1.01e-6, 1.02e-6])  # one value after softmax in float32
    exact = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(select_experts(logits, 8, True)[1].long(), exact)
    tiny = torch.tensor([[1.00e-6, 1.01e-6, 1.02e-6, -1.0]])
    assert select_experts(tiny, 3, True)[1].tolist() == [[2, 1, 0]]


def test_bias_changes_the_choice_only() -> None:
    logits, bias = torch.randn(20, 16), torch.zeros(16)
    bias[5] = 100.0
    for rule in (RoutingRule(2, "sigmoid", renormalize=False), RoutingRule(2, renormalize=False)):
        scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
        routing = apply_rule(logits, rule, bias)
        assert routing.ids_TK[:, 0].tolist() == [5] * 20
        assert torch.equal(routing.weights_TK, scores.gather(1, routing.ids_TK.long()))


def test_negative_bias_does_not_let_excluded_groups_in() -> None:
    rule = RoutingRule(2, "sigmoid", num_groups=2, top_groups=1, group_score="top2")
    bias = torch.tensor([-5.0, -5.0, -6.0, -6.0])
    assert apply_rule(torch.zeros(1, 4), rule, bias).ids_TK.tolist() == [[0, 1]]


def test_scaling_is_applied_once_after_renormalisation() -> None:
    weights = apply_rule(torch.randn(6, 8), RoutingRule(3, scaling_factor=2.5)).weights_TK
    torch.testing.assert_close(weights.sum(-1), torch.full((6,), 2.5))


def test_padding_rows_have_no_expert() -> None:
    logits = torch.randn(6, 8)
    padded = apply_rule(logits, RoutingRule(2), num_valid=torch.tensor([4], dtype=torch.int32))
    plain = apply_rule(logits, RoutingRule(2))
    assert torch.equal(padded.ids_TK[:4], plain.ids_TK[:4])
    assert torch.equal(padded.weights_TK[:4], plain.weights_TK[:4])
    assert padded.ids_TK[4:].tolist() == [[-1, -1], [-1, -1]]
    assert padded.weights_TK[4:].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", RULES)
def test_no_tokens(name: str) -> None:
    routing = apply_rule(torch.empty(0, 16), RULES[name], torch.zeros(16))
    assert routing.ids_TK.shape == routing.weights_TK.shape == (0, 4)


@pytest.mark.parametrize(
    ("rule", "num_experts", "message"),
    [
        ({"top_k": 9}, 8, "top_k=9 but only 8"),
        ({"top_k": 2, "num_groups": 3, "top_groups": 1}, 8, "can't be divided into 3 groups"),
        ({"top_k": 3, "num_groups": 4, "top_groups": 1}, 8, "only 2 of 8"),
        ({"top_k": 0}, 8, "at least one expert"),
        ({"top_k": 1, "scoring": "tanh"}, 8, "scoring"),
        ({"top_k": 1, "num_groups": 2, "top_groups": 3}, 8, "top_groups"),
        ({"top_k": 1, "group_score": "mean"}, 8, "group_score"),
    ],
)
def test_impossible_rules_are_refused(rule: dict, num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_rule(torch.zeros(1, num_experts), RoutingRule(**rule))


@pytest.mark.parametrize(
    "logits", [torch.zeros(8), torch.zeros(2, 8, dtype=torch.int64), torch.zeros(1, 2, 8)]
)
def test_wrong_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[T, E\]"):
        select_experts(logits, 2, True)


def test_wrong_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias must be \[8\]"):
        apply_rule(torch.zeros(1, 8), RoutingRule(2), torch.zeros(7))
