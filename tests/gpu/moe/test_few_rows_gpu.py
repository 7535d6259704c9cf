"""The kernels for few rows a slot on a GPU, in bf16: heights, tails, waves, biases, and as part of what is chosen."""

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
    monkeypatch, block_m: int, warps: int = 1, preload: int = 2, stages: int = 2, pairs: int = 1
) -> FusedMoeBackend:
    up, down = (Tiles(rows * pairs * warps, 128, warps, stages, preload=preload) for rows in (8, 16))
    backend, choice = FusedMoeBackend(), Choice("few_rows", block_m, up, down)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    return backend


@pytest.mark.parametrize(
    ("block_m", "dims", "warps", "symmetric"),
    [
        (8, (1024, 384), 1, True),
        (16, (384, 640), 4, False),
        (32, (512, 640), 1, True),
        (8, (384, 128), 1, False),
        (16, (128, 256), 4, True),
    ],
)
def test_agrees_with_float64_in_one_wave_and_in_two(block_m, dims, warps, symmetric, monkeypatch):
    case = cuda_case(40, 3, 7, *dims, seed=1)
    stored = store(case, "int4", 128, symmetric, "cuda")
    backend = backend_with(monkeypatch, block_m, warps)
    backend.workspace(case.x.device).poison(0xFF)
    resident = run_step(backend, case, stored)
    assert relative_error(resident, expected(case, stored)) < stored.tolerance
    assert torch.equal(run_step(backend, case, stored, waves=2), resident)


@pytest.mark.parametrize(("preload", "stages"), [(2, 1), (4, 2)])
def test_options_don_t_change_the_bits(preload, stages, monkeypatch):
    case = cuda_case(16, 4, 8, 2048, 768, seed=2)
    stored = store(case, "int4", 128, True, "cuda")
    usual = run_step(backend_with(monkeypatch, 8), case, stored)
    assert torch.equal(run_step(backend_with(monkeypatch, 8, 4, preload, stages, 2), case, stored), usual)


def test_biases(monkeypatch):
    case = cuda_case(9, 2, 4, 384, 256, bias=True, seed=3)
    stored = store(case, "int4", 128, False, "cuda")
    y = run_step(backend_with(monkeypatch, 8), case, stored, "gpt_oss")
    assert relative_error(y, expected(case, stored, "gpt_oss")) < stored.tolerance


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
