"""The kernels for few rows a slot, in Triton's interpreter: groups, tails, blocks of every height, waves, biases, NaN."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, Tiles
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import random_case, relative_error


def backend_with(
    monkeypatch, block_m: int = 8, warps: int = 8, pairs: int = 2, preload: int = 2, stages: int = 2
) -> FusedMoeBackend:
    rows = 8 * warps * pairs
    tiles = (
        Tiles(rows, 128, warps, stages, preload=preload),
        Tiles(2 * rows, 128, warps, stages, preload=preload),
    )
    backend, choice = FusedMoeBackend(), Choice("few_rows", block_m, *tiles)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    return backend


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("group", "model_dim", "hidden_dim", "block_m"),
    [(128, 384, 128, 8), (128, 256, 256, 32), (64, 320, 192, 16), (32, 96, 160, 8)],
)
def test_agrees_with_float64(group, model_dim, hidden_dim, block_m, symmetric, monkeypatch):
    """Blocks that divide neither dimension, steps that pass the end, NaN wherever no weight is, a poisoned workspace."""
    num_tokens = 17 if block_m == 32 else 5
    case = random_case(num_tokens, 2, 3, model_dim, hidden_dim, dtype=torch.float16, seed=1)
    stored = store(case, "int4", group, symmetric)
    backend = backend_with(monkeypatch, block_m)
    run_step(backend, case, stored)
    backend.workspace(case.x.device).poison(0xFF)
    assert relative_error(run_step(backend, case, stored), stored.oracle(case)) < stored.tolerance


@pytest.mark.parametrize(
    ("block_m", "num_tokens"), [(8, 8), (8, 9), (16, 9), (16, 17), (32, 17), (32, 30), (32, 33)]
)
def test_blocks_with_one_to_four_columns(block_m, num_tokens, monkeypatch):
    """All tokens meet expert 0, so that its last block has any number of rows."""
    case = random_case(num_tokens, 2, 3, 128, 128, seed=2)
    case.ids[:, 0], case.ids[:, 1] = 0, 1 + torch.arange(num_tokens) % 2
    stored = store(case, "int4")
    backend = backend_with(monkeypatch, block_m, preload=1)
    assert relative_error(run_step(backend, case, stored), stored.oracle(case)) < 3e-5


@pytest.mark.parametrize(
    ("warps", "pairs", "preload", "stages"), [(4, 1, 1, 1), (8, 1, 3, 1), (4, 2, 2, 1), (4, 4, 1, 2)]
)
def test_options_don_t_change_the_bits(warps, pairs, preload, stages, monkeypatch):
    case = random_case(5, 2, 3, 256, 256, seed=3)
    stored = store(case, "int4", symmetric=False)
    usual = run_step(backend_with(monkeypatch), case, stored)
    other = run_step(backend_with(monkeypatch, 8, warps, pairs, preload, stages), case, stored)
    assert torch.equal(usual, other)


@pytest.mark.parametrize("group", [128, 32])
def test_waves_give_the_bits_of_one_wave(group, monkeypatch):
    case = random_case(5, 3, 4, 128, 128, dtype=torch.float16, seed=4)
    stored = store(case, "int4", group)
    backend = backend_with(monkeypatch)
    resident = run_step(backend, case, stored)
    for waves in (1, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gpt_oss"])
def test_biases_and_activations(activation, monkeypatch):
    case = random_case(4, 2, 3, 96, 160, bias=True, seed=5)
    stored = store(case, "int4", 32)
    y = run_step(backend_with(monkeypatch), case, stored, activation)
    assert relative_error(y, stored.oracle(case, activation)) < 3e-5


def test_missing_routes_and_tokens_of_nan_change_nobody_else(monkeypatch):
    case = random_case(6, 2, 4, 128, 128, seed=6)
    stored = store(case, "int4", num_slots=6)  # two slots hold nothing but NaN
    backend = backend_with(monkeypatch)
    full = run_step(backend, case, stored)
    case.ids[1], case.ids[4, 0] = -1, -1
    case.x[2] = float("nan")
    case.x[5] = 0
    some = run_step(backend, case, stored)
    assert torch.equal(some[1], torch.zeros_like(some[1]))
    assert torch.equal(some[[0, 3]], full[[0, 3]])
    assert bool(some[2].isnan().all())
    assert torch.equal(some[5], torch.zeros_like(some[5]))
    assert relative_error(some[4], stored.oracle(case)[4]) < 3e-5
    case.ids.fill_(-1)
    assert torch.equal(run_step(backend, case, stored), torch.zeros_like(full))
