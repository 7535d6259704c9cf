"""Grouped GEMMs whose warps have roles (kernels.hopper): right at every fill of a block, the same bits however routes come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, DeviceLimits, can_have_roles, roles_tiles
from tests.gpu.moe.fills import case_of_fills, check_from_poison, cuda_case, expected
from tests.gpu.moe.replays import assert_replays_equal_eager_runs
from tests.interpret.moe.steps import Stored, run_step, store
from tests.moe_oracle import MoeCase, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _needs_hopper_and_its_gluon():
    limits = DeviceLimits.of(torch.device("cuda"))
    if not limits.gluon or limits.capability != (9, 0):
        pytest.skip("needs compute capability 9.0, and the Triton for whose Gluon the kernels are written")


FORMATS = [("none", torch.bfloat16), ("none", torch.float16), ("fp8", torch.bfloat16)]
DIMS = [(256, 128), (512, 384), (2048, 768)]
FILLS = (1, 63, 64, 65, 127, 128, 129, 192, 193, 0, 256, 257)  # rows of each slot


def filled_case(dims: tuple[int, int], dtype: torch.dtype) -> MoeCase:
    return case_of_fills(500, FILLS, dims, dtype)


def with_roles(stored: Stored, case: MoeCase, **options: int) -> FusedMoeBackend:
    problem = stored.problem(case)
    assert can_have_roles(problem, DeviceLimits.of(case.x.device))
    tiles = [replace(tiles, **options) for tiles in roles_tiles(problem)]
    return FusedMoeBackend(
        records=lambda problem, limits: {problem.num_tokens: Choice("grouped", 128, *tiles)}
    )


@pytest.mark.parametrize("group_m", [1, 8])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_every_fill_of_a_block_agrees_with_the_definition(name, dtype, dims, group_m):
    case = filled_case(dims, dtype)
    stored = store(case, name, device="cuda")
    backend = with_roles(stored, case, group_m=group_m)
    check_from_poison(case, stored, backend)


@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_waves_give_the_bits_of_one_wave(name, dtype):
    case = filled_case((512, 384), dtype)
    stored = store(case, name, device="cuda")
    backend = with_roles(stored, case)
    resident = run_step(backend, case, stored)
    for waves in (1, 2, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


@pytest.mark.parametrize("name", ["none", "fp8"])
def test_many_repeats_are_bitwise_equal(name):
    case = cuda_case(1500, 4, 16, (512, 768), torch.bfloat16, seed=3)
    stored = store(case, name, device="cuda")
    backend = with_roles(stored, case)
    first = run_step(backend, case, stored)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        different += (run_step(backend, case, stored) != first).any()
    assert int(different) == 0


def test_replays_with_changing_routes_equal_eager_runs():
    case = cuda_case(300, 4, 8, (512, 384), torch.bfloat16, seed=4)
    stored = store(case, "none", device="cuda")
    backend = with_roles(stored, case)
    assert_replays_equal_eager_runs(backend, case, stored, replays=100, skew=0.1)


def test_a_row_of_nan_stays_alone():
    case = filled_case((512, 384), torch.bfloat16)
    case.x[7] = float("nan")
    case.ids[7] = torch.tensor([1, 3, 6, 11], dtype=torch.int32)
    stored = store(case, "none", device="cuda")
    y = run_step(with_roles(stored, case), case, stored)
    assert y[7].isnan().all()
    assert y[torch.arange(500, device="cuda") != 7].isfinite().all()


def test_many_tokens_get_them_without_a_record():
    case = cuda_case(4096, 2, 8, (256, 128), torch.bfloat16, seed=5)
    stored = store(case, "none", device="cuda")
    backend = FusedMoeBackend(records=lambda problem, limits: None)
    choice = backend.choose(stored.problem(case), case.x.device)
    assert choice.gate_up.roles
    assert choice.down.roles
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance
