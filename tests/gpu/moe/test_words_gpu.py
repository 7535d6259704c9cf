"""The decode kernels on 32-bit words on a GPU, in bf16: with four words a thread and without, in one wave and in several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.kernels.launch_words import in_lane_order
from minisgl.moe.select import Choice, Tiles
from tests.gpu.moe.fills import EXTREME_SCALES, check_every_code
from tests.gpu.moe.test_fused_moe_gpu import cuda_case, expected, needs_fp8
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Tiles whose threads hold four words at a time, with a second step for up and a tail for down.
FOURS = {
    "none": (Tiles(4, 512, 2), Tiles(8, 256, 4)),
    "int8": (Tiles(4, 512, 1), Tiles(8, 256, 2, preload=2)),
    "fp8": (Tiles(4, 512, 1, preload=2), Tiles(8, 256, 2)),
    "fp8_block": (Tiles(4, 512, 1), Tiles(8, 256, 2)),
    "int4": (Tiles(4, 1024, 1), Tiles(8, 256, 1, preload=2)),
    "mxfp4": (Tiles(4, 1024, 1), Tiles(8, 256, 1, preload=2)),
}
SINGLES = Tiles(4, 128, 4), Tiles(8, 128, 4)
FORMATS = [
    ("none", 0, True),
    ("int8", 0, True),
    ("fp8", 0, True),
    ("fp8_block", 128, True),
    ("int4", 128, True),
    ("int4", 128, False),
    ("int4", 32, False),
    ("mxfp4", 32, True),
]


def backend_with(tiles: tuple[Tiles, Tiles], monkeypatch) -> FusedMoeBackend:
    backend, choice = FusedMoeBackend(), Choice("direct", 1, *tiles)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    return backend


@pytest.mark.parametrize(("name", "group", "symmetric"), FORMATS)
def test_four_words_a_thread_and_waves(name, group, symmetric, monkeypatch):
    needs_fp8(name)
    case = cuda_case(3, 3, 5, 1024, 384, seed=1)
    stored = store(case, name, group or 128, symmetric, "cuda")
    backend = backend_with(FOURS[name], monkeypatch)
    backend.workspace(case.x.device).poison(0xFF)
    resident = run_step(backend, case, stored)
    assert relative_error(resident, expected(case, stored)) < stored.tolerance
    assert torch.equal(run_step(backend, case, stored, waves=2), resident)


@pytest.mark.parametrize(("name", "group", "symmetric"), FORMATS)
def test_single_words(name, group, symmetric, monkeypatch):
    needs_fp8(name)
    case = cuda_case(3, 3, 5, 1024, 384, bias=True, seed=2)
    stored = store(case, name, group or 128, symmetric, "cuda")
    y = run_step(backend_with(SINGLES, monkeypatch), case, stored)
    assert relative_error(y, expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("factor", [2.0**30, 2.0**-30])
def test_activations_that_float16_cannot_hold(name, factor, monkeypatch):
    """Large and small ones, in neighbouring columns too, and a row of zeros."""
    needs_fp8(name)
    case = cuda_case(4, 3, 5, 1024, 384, seed=4)
    stored = store(case, name, device="cuda")
    x = case.x * factor
    x[1, ::3] *= 2.0**-30
    x[2, :512] *= 2.0**10
    x[3] = 0
    scaled = replace(case, x=x)
    y, want = run_step(backend_with(FOURS[name], monkeypatch), scaled, stored), expected(scaled, stored)
    for row in range(3):  # rows differ in size, so one by one
        assert relative_error(y[row], want[row]) < stored.tolerance
    assert not y[3].any()


@pytest.mark.parametrize("tiles", [
    (Tiles(4, 1024, 1), Tiles(8, 256, 1, preload=2)),
    (Tiles(8, 1024, 1, registers=128), Tiles(8, 256, 2)),
    (Tiles(4, 512, 2), Tiles(8, 512, 4, preload=2)),  # two words a thread, and a tail
    SINGLES,
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "group", "symmetric"), [("int4", 128, True), ("int4", 128, False), ("mxfp4", 32, True)]
)
def test_activated_rows_in_lane_order(name, group, symmetric, tiles, monkeypatch):
    """Hidden dims in whole blocks of 256: down reads rows as gate_up arranged them, in one wave and in several."""
    case = cuda_case(4, 3, 5, 1024, 768, bias=True, seed=5)
    stored = store(case, name, group, symmetric, "cuda")
    backend = backend_with(tiles, monkeypatch)
    assert in_lane_order(stored.problem(case), Choice("direct", 1, *tiles), case.x.device)
    backend.workspace(case.x.device).poison(0xFF)
    resident = run_step(backend, case, stored)
    assert relative_error(resident, expected(case, stored)) < stored.tolerance
    assert torch.equal(run_step(backend, case, stored, waves=2), resident)


def test_rows_of_x_that_start_anywhere(monkeypatch):
    """x that isn't on 16 bytes, nor even on 4."""
    case = cuda_case(3, 3, 5, 1024, 384, seed=3)
    stored = store(case, "int4", 128, True, "cuda")
    moved = torch.empty(case.x.numel() + 1, dtype=case.x.dtype, device="cuda")[1:].view_as(case.x)
    moved.copy_(case.x)
    backend = backend_with(FOURS["int4"], monkeypatch)
    aligned = run_step(backend, case, stored)
    assert torch.equal(run_step(backend, replace(case, x=moved), stored), aligned)


# Single words are multiplied first and scaled then: weights beyond float32 are no infinities there.
EXTREMES = [((Tiles(4, 1024, 1), Tiles(8, 1024, 1)), scale) for scale in EXTREME_SCALES]
EXTREMES += [(SINGLES, scale) for scale in EXTREME_SCALES if scale not in (253, 254)]


@pytest.mark.parametrize(("tiles", "scale"), EXTREMES)
def test_every_code_of_mxfp4_with_extreme_scales(tiles, scale):
    choice = Choice("direct", 1, *tiles)
    check_every_code(
        scale, 16, lambda stored, case: FusedMoeBackend(records=lambda p, limits: {p.num_tokens: choice})
    )
