"""The kernels for few rows a slot on a GPU, in bf16: groups, heights, tails, waves, biases, and as part of what is chosen."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, Tiles, few_rows_heuristic
from tests.gpu.moe.test_fused_moe_gpu import cuda_case, expected
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def backend_with(
    monkeypatch, block_m: int, warps: int = 1, preload: int = 2, stages: int = 2
) -> FusedMoeBackend:
    tiles = (
        Tiles(16 * warps, 128, warps, stages, preload=preload),
        Tiles(32 * warps, 128, warps, stages, preload=preload),
    )
    backend, choice = FusedMoeBackend(), Choice("few_rows", block_m, *tiles)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    return backend


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(
    ("group", "block_m", "dims"),
    [
        (128, 8, (1024, 384)),
        (128, 16, (384, 1024)),
        (128, 32, (512, 640)),
        (64, 8, (320, 192)),
        (64, 16, (2880, 704)),
        (32, 8, (352, 96)),
    ],
)
def test_agrees_with_float64_in_one_wave_and_in_two(group, block_m, dims, warps, symmetric, monkeypatch):
    case = cuda_case(40, 3, 7, *dims, seed=1)
    stored = store(case, "int4", group, symmetric, "cuda")
    backend = backend_with(monkeypatch, block_m, warps)
    backend.workspace(case.x.device).poison(0xFF)
    resident = run_step(backend, case, stored)
    assert relative_error(resident, expected(case, stored)) < stored.tolerance
    assert torch.equal(run_step(backend, case, stored, waves=2), resident)


@pytest.mark.parametrize(("preload", "stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (4, 2)])
def test_options_don_t_change_the_bits(preload, stages, monkeypatch):
    case = cuda_case(16, 4, 8, 2048, 768, seed=2)
    stored = store(case, "int4", 128, True, "cuda")
    usual = run_step(backend_with(monkeypatch, 8), case, stored)
    assert torch.equal(run_step(backend_with(monkeypatch, 8, 4, preload, stages), case, stored), usual)


@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_biases(activation, monkeypatch):
    case = cuda_case(9, 2, 4, 320, 192, bias=True, seed=3)
    stored = store(case, "int4", 64, False, "cuda")
    y = run_step(backend_with(monkeypatch, 16), case, stored, activation)
    assert relative_error(y, expected(case, stored, activation)) < stored.tolerance


def test_a_measured_choice_and_missing_routes():
    case = cuda_case(24, 2, 16, 1024, 512, seed=4)
    case.ids[3], case.ids[7, 1] = -1, -1
    stored = store(case, "int4", 128, True, "cuda", num_slots=20)  # four slots hold nothing but NaN
    choice = few_rows_heuristic(stored.problem(case))
    backend = FusedMoeBackend(records=lambda problem, limits: {32: choice})
    assert backend.choose(stored.problem(case), case.x.device) == choice
    y = run_step(backend, case, stored)
    assert relative_error(y, expected(case, stored)) < stored.tolerance
    assert not bool(y[3].any())
