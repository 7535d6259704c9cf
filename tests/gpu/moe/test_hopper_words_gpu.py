"""Grouped GEMMs of 4-bit weights whose warps have roles (kernels.hopper_words): right at every fill of a block, the same bits
however routes come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, DeviceLimits, can_have_roles, roles_tiles
from tests.gpu.moe.fills import EXTREME_SCALES, check_every_code, check_from_poison, cuda_case, expected
from tests.gpu.moe.replays import assert_replays_equal_eager_runs
from tests.gpu.moe.test_hopper_gpu import (  # noqa: F401 (a fixture that skips)
    _needs_hopper_and_its_gluon,
    filled_case,
)
from tests.interpret.moe.steps import Stored, run_step, store
from tests.moe_oracle import MoeCase, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS = [16, 32, 64, 128]
FORMATS = {"int4": ("int4", 128), "int4 with zeros": ("int4", 128, False), "mxfp4": ("mxfp4", 32)}
PLAIN = ("int4", "mxfp4")
DIMS = [(256, 128), (512, 384), (2048, 768)]  # the last two differ in how many groups a step has


def stored_as(case: MoeCase, format_name: str) -> Stored:
    return store(case, *FORMATS[format_name], device="cuda")


def with_words(stored: Stored, case: MoeCase, block_m: int, **options: int) -> FusedMoeBackend:
    problem = stored.problem(case)
    assert can_have_roles(problem, DeviceLimits.of(case.x.device))
    tiles = [replace(tiles, **options) for tiles in roles_tiles(problem, block_m)]
    return FusedMoeBackend(
        records=lambda problem, limits: {problem.num_tokens: Choice("grouped", block_m, *tiles)}
    )


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("block_m", BLOCKS)
def test_every_fill_of_a_block_agrees_with_the_definition(block_m, dims, format_name):
    case = filled_case(dims, torch.bfloat16)
    stored = stored_as(case, format_name)
    backend = with_words(stored, case, block_m)
    check_from_poison(case, stored, backend)


@pytest.mark.parametrize(
    ("block_m", "dims"), [(16, (192, 320)), (128, (192, 320)), (32, (2880, 576)), (64, (576, 2880))]
)
def test_mxfp4_with_biases_and_sizes_that_tiles_do_not_divide(block_m, dims):
    """Rows of scales begin in the middle of words, and the last step, the last units and the last outputs are fewer."""
    plain = filled_case(dims, torch.bfloat16)
    bias = torch.randn((plain.down.shape[0], 2 * dims[1] + dims[0]), device="cuda")
    case = replace(plain, gate_up_bias=bias[:, : 2 * dims[1]], down_bias=bias[:, 2 * dims[1] :])
    for one, activation in ((plain, "silu"), (case, "gpt_oss")):
        stored = stored_as(one, "mxfp4")
        check_from_poison(one, stored, with_words(stored, one, block_m), activation)


@pytest.mark.parametrize("group_m", [1, 8])
def test_the_order_of_tiles_changes_no_bit(group_m):
    case = filled_case((512, 384), torch.bfloat16)
    stored = store(case, "int4", device="cuda")
    first = run_step(with_words(stored, case, 128, group_m=4), case, stored)
    assert torch.equal(run_step(with_words(stored, case, 128, group_m=group_m), case, stored), first)


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize("block_m", [32, 128])
def test_waves_give_the_bits_of_one_wave(block_m, format_name):
    case = filled_case((512, 384), torch.bfloat16)
    stored = stored_as(case, format_name)
    backend = with_words(stored, case, block_m)
    resident = run_step(backend, case, stored)
    for waves in (1, 2, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize("block_m", BLOCKS)
def test_many_repeats_are_bitwise_equal(block_m, format_name):
    case = cuda_case(1500, 4, 16, (512, 768), torch.bfloat16, seed=3)
    stored = stored_as(case, format_name)
    backend = with_words(stored, case, block_m)
    first = run_step(backend, case, stored)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        different += (run_step(backend, case, stored) != first).any()
    assert int(different) == 0


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize("block_m", [32, 128])
def test_replays_with_changing_routes_equal_eager_runs(block_m, format_name):
    case = cuda_case(300, 4, 8, (512, 384), torch.bfloat16, seed=4)
    stored = stored_as(case, format_name)
    backend = with_words(stored, case, block_m)
    assert_replays_equal_eager_runs(backend, case, stored, replays=50, skew=0.1)


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize("block_m", [32, 128])
def test_a_row_of_nan_stays_alone(block_m, format_name):
    case = filled_case((512, 384), torch.bfloat16)
    case.x[7] = float("nan")
    case.ids[7] = torch.tensor([1, 3, 6, 11], dtype=torch.int32)
    stored = stored_as(case, format_name)
    y = run_step(with_words(stored, case, block_m), case, stored)
    assert y[7].isnan().all()
    assert y[torch.arange(500, device="cuda") != 7].isfinite().all()


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize("num_tokens", [40, 300, 4096])
def test_got_without_a_record(num_tokens, format_name):
    case = cuda_case(num_tokens, 2, 8, (256, 128), torch.bfloat16, seed=5)
    stored = stored_as(case, format_name)
    backend = FusedMoeBackend(records=lambda problem, limits: None)
    choice = backend.choose(stored.problem(case), case.x.device)
    assert choice.gate_up.roles
    assert choice.down.roles
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("format_name", PLAIN)
def test_a_gemm_of_each_kind_fit_together(format_name):
    """Tiles of the two GEMMs are chosen apart."""
    case = filled_case((512, 384), torch.bfloat16)
    stored = stored_as(case, format_name)
    problem = stored.problem(case)
    roles = roles_tiles(problem, 16)
    plain = [replace(tiles, block_k=128, num_warps=4, num_stages=3, roles=False) for tiles in roles]
    for tiles in ((roles[0], plain[1]), (plain[0], roles[1])):
        choice = Choice("grouped", 16, *tiles)
        backend = FusedMoeBackend(records=lambda problem, limits, choice=choice: {problem.num_tokens: choice})
        assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize("scale", EXTREME_SCALES)
def test_every_code_with_extreme_scales(scale, block_m):
    check_every_code(scale, 256, lambda stored, case: with_words(stored, case, block_m))
