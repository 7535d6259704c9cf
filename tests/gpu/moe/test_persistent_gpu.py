"""Both grouped GEMMs in one launch (kernels.persistent): right at every fill of a block, the same bits however they are run."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.base import Placement, Routing
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import DeviceLimits, can_be_persistent, persistent_choice
from tests.gpu.moe.fills import case_of_fills, check_from_poison, cuda_case, expected
from tests.gpu.moe.replays import assert_replays_equal_eager_runs
from tests.interpret.moe.steps import Stored, run_step, store
from tests.moe_oracle import MoeCase, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _needs_hopper_and_its_gluon():
    limits = DeviceLimits.of(torch.device("cuda"))
    if not limits.gluon or limits.capability != (9, 0):
        pytest.skip("needs compute capability 9.0, and the Triton for whose Gluon the kernel is written")


FORMATS = [
    ("none", torch.bfloat16),
    ("none", torch.float16),
    ("fp8", torch.bfloat16),
    ("int8", torch.bfloat16),
]
BLOCKS = [(16, 1, 2), (32, 2, 1), (64, 2, 1), (128, 2, 1)]  # rows, consumers, programs a multiprocessor
FILLS = (1, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 96, 127, 128, 129)  # rows of each slot


def filled_case(dims: tuple[int, int], dtype: torch.dtype) -> MoeCase:
    return case_of_fills(250, FILLS, dims, dtype)


def persistent(
    stored: Stored, case: MoeCase, block_m: int = 32, consumers: int = 1, group_m: int = 1, programs: int = 1
) -> FusedMoeBackend:
    problem = stored.problem(case)
    assert can_be_persistent(problem, DeviceLimits.of(case.x.device))
    choice = persistent_choice(problem, block_m, consumers, group_m, programs)
    return FusedMoeBackend(records=lambda problem, limits: {problem.num_tokens: choice})


@pytest.mark.parametrize(("block_m", "consumers", "programs"), BLOCKS)
@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_every_fill_of_a_block_agrees_with_the_definition(name, dtype, block_m, consumers, programs):
    case = filled_case((512, 384), dtype)
    stored = store(case, name, device="cuda")
    check_from_poison(
        case, stored, persistent(stored, case, block_m, consumers, 4 if block_m >= 64 else 1, programs)
    )


@pytest.mark.parametrize("dims", [(256, 128), (2048, 768), (256, 1152)])
@pytest.mark.parametrize("name", ["none", "fp8", "int8"])
def test_dimensions(name, dims):
    """One step of K; a model's; more columns than are quantized at a time."""
    case = filled_case(dims, torch.bfloat16)
    stored = store(case, name, device="cuda")
    check_from_poison(case, stored, persistent(stored, case))


@pytest.mark.parametrize("block_m", [32, 128])
@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_waves_and_parts_give_the_bits_of_one_launch(name, dtype, block_m):
    case = filled_case((512, 384), dtype)
    stored = store(case, name, device="cuda")
    backend = persistent(stored, case, block_m, 2 if block_m == 128 else 1)
    resident = run_step(backend, case, stored)
    for waves in (1, 2, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)
    step = backend.begin(case.x, Routing(case.ids, case.weights), stored.problem(case))
    between = []
    step.run(Placement(stored.slab, case.ids, before_down=lambda: between.append(len(between))))
    assert between == [0]
    assert torch.equal(step.finish(), resident)


@pytest.mark.parametrize("name", ["none", "fp8", "int8"])
def test_many_repeats_are_bitwise_equal(name):
    case = cuda_case(100, 4, 16, (512, 768), torch.bfloat16, seed=3)
    stored = store(case, name, device="cuda")
    backend = persistent(stored, case)
    first = run_step(backend, case, stored)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        different += (run_step(backend, case, stored) != first).any()
    assert int(different) == 0


@pytest.mark.parametrize("name", ["none", "fp8"])
def test_replays_with_changing_routes_equal_eager_runs(name):
    case = cuda_case(60, 4, 8, (512, 384), torch.bfloat16, seed=4)
    stored = store(case, name, device="cuda")
    backend = persistent(stored, case)
    assert_replays_equal_eager_runs(backend, case, stored, replays=100, skew=0.1)


@pytest.mark.parametrize("name", ["none", "fp8", "int8"])
def test_a_row_of_nan_stays_alone(name):
    case = filled_case((512, 384), torch.bfloat16)
    case.x[7] = float("nan")
    case.ids[7] = torch.tensor([1, 3, 6, 10], dtype=torch.int32)
    stored = store(case, name, device="cuda")
    y = run_step(persistent(stored, case), case, stored)
    assert y[7].isnan().all()
    assert y[torch.arange(250, device="cuda") != 7].isfinite().all()


def test_few_rows_a_slot_get_it_without_a_record():
    case = cuda_case(64, 2, 8, (256, 128), torch.bfloat16, seed=5)
    stored = store(case, "none", device="cuda")
    backend = FusedMoeBackend(records=lambda problem, limits: None)
    assert backend.choose(stored.problem(case), case.x.device).kernel == "persistent"
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance
