"""The plain definition against the float64 loop: shapes, sentinels, aliasing, precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe import registry
from minisgl.moe.base import Activation, ExpertShape, Placement, Problem, Routing, Slab, select_experts
from minisgl.moe.registry import make_backend, moe_backend_choices
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.moe_oracle import MoeCase, moe_oracle, random_case, relative_error

BACKEND = TorchMoeBackend()
ROUNDING = 3e-6  # of float32 sums, in whichever order the CPU at hand adds them up


def run(case: MoeCase, activation: Activation = "silu") -> torch.Tensor:
    return BACKEND.forward_ids(case.x, case.gate_up, case.down, case.ids, case.weights, activation)


@pytest.mark.parametrize("model_dim", [64, 192, 320])
@pytest.mark.parametrize("hidden_dim", [1, 48, 80, 96, 192])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 33])
def test_equals_the_oracle(num_tokens: int, hidden_dim: int, model_dim: int) -> None:
    case = random_case(num_tokens, 2, 8, model_dim, hidden_dim)
    assert relative_error(run(case), case.oracle()) < ROUNDING


@pytest.mark.parametrize("num_experts", [1, 5, 60, 128, 257, 1030])
def test_any_number_of_experts(num_experts: int) -> None:
    for top_k in {k for k in (1, 2, 6, 10, 16) if k <= num_experts}:
        case = random_case(5, top_k, num_experts, 16, 8)
        case.ids[0, 0] = num_experts - 1
        assert relative_error(run(case), case.oracle()) < ROUNDING


@pytest.mark.parametrize("activation", ["silu", "gelu", "gpt_oss"])
def test_activations(activation: Activation) -> None:
    case = random_case(6, 2, 4, 64, 48)
    loud = dataclasses.replace(case, x=case.x * 8)  # far enough for the clamps of gpt_oss
    assert relative_error(run(loud, activation), loud.oracle(activation)) < ROUNDING


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'relu'"):
        run(random_case(1, 1, 2, 16, 8), "relu")  # type: ignore[arg-type]


def test_biases() -> None:
    case = random_case(6, 2, 4, 64, 48, bias=True)
    shape = ExpertShape(64, 48, bias=True)
    parts = {"gate_up": case.gate_up, "down": case.down}
    parts |= {"gate_up_bias": case.gate_up_bias, "down_bias": case.down_bias}
    step = BACKEND.begin(
        case.x, Routing(case.ids, case.weights), Problem(6, 2, 4, shape, "fp32", torch.float32)
    )
    step.run(Placement(Slab.of_tensors("fp32", shape, parts), case.ids))  # type: ignore[arg-type]
    assert relative_error(step.finish(), case.oracle()) < ROUNDING


@pytest.mark.parametrize("renormalize", [True, False])
def test_forward_routes_and_multiplies(renormalize: bool) -> None:
    case, logits = random_case(37, 2, 8, 64, 48), torch.randn(37, 8)
    y = BACKEND.forward(case.x, case.gate_up, case.down, logits, 2, renormalize)
    weights, ids = select_experts(logits, 2, renormalize)
    assert relative_error(y, moe_oracle(case.x, case.gate_up, case.down, ids, weights)) < ROUNDING


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4), (torch.float32, ROUNDING)]
)
def test_low_precision_rounds_only_the_output(dtype: torch.dtype, tolerance: float) -> None:
    case = random_case(17, 4, 8, 128, 96, dtype=dtype)
    y = run(case)
    assert y.dtype == dtype
    assert relative_error(y, case.oracle()) < tolerance


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_no_tokens_then_some(top_k: int) -> None:
    case = random_case(3, top_k, 8, 64, 48)
    empty = dataclasses.replace(case, x=case.x[:0], ids=case.ids[:0], weights=case.weights[:0])
    assert run(empty).shape == (0, 64)
    assert BACKEND.forward(empty.x, case.gate_up, case.down, torch.empty(0, 8), top_k, True).shape == (0, 64)
    assert relative_error(run(case), case.oracle()) < ROUNDING


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), min_size=1, max_size=9))
def test_any_routes(ids: list[list[int]]) -> None:
    """Empty and overfull experts, absent routes, the same expert twice: all are sums over routes."""
    case = random_case(len(ids), 3, 6, 32, 16)
    case = dataclasses.replace(case, ids=torch.tensor(ids, dtype=torch.int32))
    y = run(case)
    assert relative_error(y, case.oracle()) < ROUNDING
    for token, row in enumerate(ids):
        if row == [-1, -1, -1]:
            assert not y[token].any()


def test_absent_rows_are_zero_and_harm_nobody() -> None:
    case = random_case(12, 2, 4, 64, 48)
    absent = torch.tensor([1, 2, 7, 11])
    present = torch.tensor([t for t in range(12) if t not in absent.tolist()])
    padded = dataclasses.replace(case, x=case.x.clone(), ids=case.ids.clone(), weights=case.weights.clone())
    padded.ids[absent], padded.x[absent], padded.weights[absent] = -1, torch.nan, torch.nan
    without = dataclasses.replace(
        case, x=case.x[present], ids=case.ids[present], weights=case.weights[present]
    )
    y = run(padded)
    assert torch.equal(y[absent], torch.zeros(4, 64))
    assert torch.equal(y[present], run(without))


def test_all_rows_absent() -> None:
    case = random_case(12, 2, 4, 64, 48)
    assert torch.equal(run(dataclasses.replace(case, ids=torch.full((12, 2), -1))), torch.zeros(12, 64))


def test_absent_route_adds_exactly_zero() -> None:
    case = random_case(6, 2, 4, 64, 48)
    case.ids[:, 1] = -1
    alone = dataclasses.replace(case, ids=case.ids[:, :1], weights=case.weights[:, :1])
    assert torch.equal(run(case), run(alone))


@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_takes_all(expert: int) -> None:
    case = random_case(20, 1, 4, 64, 48)
    case.ids[:] = expert
    assert relative_error(run(case), case.oracle()) < ROUNDING


def test_token_order_does_not_matter() -> None:
    case, order = random_case(16, 3, 8, 64, 48), torch.randperm(16)
    moved = dataclasses.replace(case, x=case.x[order], ids=case.ids[order], weights=case.weights[order])
    torch.testing.assert_close(run(moved), run(case)[order], rtol=1e-5, atol=1e-6)


def test_expert_numbers_do_not_matter() -> None:
    case, order = random_case(16, 3, 8, 64, 48), torch.randperm(8)
    renamed = dataclasses.replace(
        case, gate_up=case.gate_up[order], down=case.down[order], ids=order.argsort()[case.ids.long()].int()
    )
    assert torch.equal(run(renamed), run(case))


def test_a_token_alone_and_in_company() -> None:
    case = random_case(64, 2, 8, 64, 48)
    alone = dataclasses.replace(case, x=case.x[5:6], ids=case.ids[5:6], weights=case.weights[5:6])
    torch.testing.assert_close(run(alone), run(case)[5:6], rtol=1e-5, atol=1e-6)


def test_repeats_are_equal_and_nothing_is_shared() -> None:
    case = random_case(16, 2, 8, 64, 48)
    before, first = case.x.clone(), run(case)
    kept = first.clone()
    for _ in range(20):
        assert torch.equal(run(case), kept)
    run(random_case(64, 2, 8, 64, 48, seed=1))
    assert torch.equal(first, kept)
    assert torch.equal(case.x, before)


@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_scale_of_weights_does_not_matter(scale: float) -> None:
    case = random_case(9, 2, 4, 64, 48)
    scaled = dataclasses.replace(case, down=case.down * scale)
    assert relative_error(run(scaled), scaled.oracle()) < ROUNDING


def test_zero_token_and_zero_channel_are_exact() -> None:
    case = random_case(4, 2, 4, 64, 48)
    case.x[1], case.down[:, 7] = 0.0, 0.0
    y = run(case)
    assert not y[1].any()
    assert not y[:, 7].any()


@pytest.mark.parametrize("bad", [4, 11, -2])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    case = random_case(3, 2, 4, 64, 48)
    case.ids[1, 0], case.ids[2, 1] = bad, -1
    with pytest.raises(ValueError, match=r"allowed are 0\.\.3 and -1"):
        run(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 63)}, r"hidden_states must be \[T, 64\]"),
        ({"x": torch.zeros(64)}, r"hidden_states \[T, D\]"),
        ({"x": torch.zeros(3, 64, dtype=torch.float64)}, "float64"),
        ({"gate_up": torch.zeros(4, 95, 64)}, r"\[4, 96, 64\].*not \[4, 95, 64\]"),
        ({"gate_up": torch.zeros(3, 96, 64)}, r"\[4, 96, 64\].*not \[3, 96, 64\]"),
        ({"down": torch.zeros(4, 64, 48, dtype=torch.bfloat16)}, "store both in one dtype"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, r"must both be \[3, K\]"),
        ({"ids": torch.zeros(3, 2)}, "int32 or int64"),
        ({"weights": torch.zeros(3, 1)}, r"must both be \[3, K\]"),
    ],
)
def test_tensors_that_do_not_belong_together(change: dict, message: str) -> None:
    case = random_case(3, 2, 4, 64, 48)
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(case, **change))


def test_logits_of_another_shape_are_refused() -> None:
    case = random_case(3, 2, 4, 64, 48)
    with pytest.raises(ValueError, match=r"\[T, E\] = \[3, 4\], not \[3, 5\]"):
        BACKEND.forward(case.x, case.gate_up, case.down, torch.zeros(3, 5), 2, True)


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(moe_backend_choices) == {"auto", "fused", "torch"}
    assert make_backend("torch", "cuda").name == make_backend("auto", "cpu").name == "torch"
    assert make_backend("fused", "cpu").name == make_backend("auto", "cuda").name == "fused"
    with pytest.raises(ValueError, match=r"'cutlass'.*auto, fused, torch"):
        make_backend("cutlass", "cpu")
    monkeypatch.setattr(registry, "FusedMoeBackend", None)  # as without Triton
    assert make_backend("auto", "cuda").name == "torch"
    with pytest.raises(ValueError, match="needs Triton"):
        make_backend("fused", "cuda")
