"""Both MoE kernels in every format against the float64 oracle, in Triton's interpreter: tails, NaN around, waves, biases."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.base import Placement, Routing
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.kernels.launch import SumUnits, sum_units
from minisgl.moe.select import Choice, Tiles
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.moe.workspace import max_blocks
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import random_case, relative_error

FORMATS = [
    ("none", 0, True),
    ("fp8", 0, True),
    ("int8", 0, True),
    ("int4", 32, True),
    ("int4", 32, False),
    ("int4", 64, False),
    ("fp8_block", 128, True),
    ("mxfp4", 32, True),
]
KERNELS = {"grouped": 0, "direct": 64}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "group", "symmetric"), FORMATS)
def test_every_format_agrees_with_float64(kernel, name, group, symmetric):
    """D and F are no multiples of any tile, the slab is NaN wherever no weight is, the workspace was poisoned."""
    case = random_case(2, 2, 4, 192, 64 if group == 64 else 96, dtype=torch.float16, seed=1)
    stored = store(case, name, group, symmetric)
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    run_step(backend, case, stored)
    backend.workspace(case.x.device).poison(0xFF)
    y = run_step(backend, case, stored)
    assert y.dtype == torch.float16
    assert relative_error(y, stored.oracle(case)) < stored.tolerance


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("group", "symmetric", "up_k", "down_k"), [(128, True, 128, 64), (64, False, 64, 64)]
)
def test_int4_codes_multiplied_as_they_are(group, symmetric, up_k, down_k, swap):
    """Steps of half a group and of a group, with the sums of rows that make up for what codes are too large."""
    case = random_case(3, 2, 3, 256, 128, dtype=torch.float16, seed=5)
    stored = store(case, "int4", group, symmetric)
    tiles = Tiles(64, up_k, 4, swap=swap), Tiles(64, down_k, 4, swap=swap)
    choice = Choice("grouped", 16, *tiles)
    assert sum_units(stored.problem(case), choice) == SumUnits(up_k, 64)
    backend = FusedMoeBackend(records=lambda problem, limits: {problem.num_tokens: choice})
    run_step(backend, case, stored)
    backend.workspace(case.x.device).poison(0xFF)
    assert relative_error(run_step(backend, case, stored), stored.oracle(case)) < stored.tolerance


def test_fp8_executes_fp8_in_the_grouped_kernel_and_none_in_the_direct_one():
    """Against the emulated scheme (rows quantized before both products) the grouped kernel is exact to rounding."""
    case = random_case(4, 2, 3, 64, 48, seed=2)
    stored = store(case, "fp8")
    grouped = run_step(FusedMoeBackend(small_m_threshold=0), case, stored)
    direct = run_step(FusedMoeBackend(small_m_threshold=64), case, stored)
    assert relative_error(grouped, _emulated_fp8(case, stored)) < 2e-3
    assert relative_error(direct, stored.oracle(case)) < 1e-5
    assert relative_error(grouped, stored.oracle(case)) > 5e-3  # so the first assertion says something


def _emulated_fp8(case, stored):
    def rounded(x):
        scale = x.abs().amax().clamp(min=1e-30) / 448.0
        return (x / scale).to(torch.float8_e4m3fn).double() * scale.double()

    y = torch.zeros_like(case.x, dtype=torch.float64)
    for t in range(case.x.shape[0]):
        for k in range(case.ids.shape[1]):
            e = int(case.ids[t, k])
            hidden = stored.gate_up[e].double() @ rounded(case.x[t].float())
            gate, up = hidden.chunk(2)
            row = stored.down[e].double() @ rounded((gate * gate.sigmoid() * up).float())
            y[t] += case.weights[t, k].double() * row
    return y


@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(64, 48), (192, 80), (320, 96)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tails_of_both_dimensions(kernel, model_dim, hidden_dim):
    case = random_case(5, 2, 3, model_dim, hidden_dim, seed=3)
    stored = store(case, "none")
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, stored)
    assert relative_error(y, stored.oracle(case)) < 1e-5


@pytest.mark.parametrize("hidden_dim", [80, 192])
@pytest.mark.parametrize("kernel", KERNELS)
def test_block_scales_where_128_does_not_divide(kernel, hidden_dim):
    case = random_case(3, 2, 3, 320, hidden_dim, seed=4)
    stored = store(case, "fp8_block")
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, stored)
    assert relative_error(y, stored.oracle(case)) < stored.tolerance


@pytest.mark.parametrize("activation", ["silu", "gelu", "gpt_oss"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_biases_and_activations(kernel, activation):
    case = random_case(4, 2, 3, 64, 64, bias=True, seed=5)
    stored = store(case, "mxfp4")
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, stored, activation)
    assert relative_error(y, stored.oracle(case, activation)) < 1e-4


@pytest.mark.parametrize("activation", ["silu", "gelu", "gpt_oss"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_of_nan_stays_nan_and_alone(kernel, activation):
    case = random_case(4, 2, 3, 64, 64, seed=5)
    case.x[2] = float("nan")
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, store(case, "none"), activation)
    assert bool(y[2].isnan().all())
    assert bool(y[[0, 1, 3]].isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "group"), [("none", 0), ("fp8", 0), ("int4", 32)])
def test_waves_give_the_bits_of_one_wave(kernel, name, group):
    """The row sums of the direct kernel are added in registers when all is resident, and by the reduce in waves."""
    case = random_case(3, 3, 5, 64, 64, dtype=torch.float16, seed=6)
    stored = store(case, name, group or 128)
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    resident = run_step(backend, case, stored)
    for waves in (1, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


OPTIONS = [
    Tiles(32, 64, 4),
    Tiles(32, 32, 4, swap=True),
    Tiles(16, 64, 4, tiles_n=3),
    Tiles(16, 64, 4, group_m=4),
]


@pytest.mark.parametrize("tiles", OPTIONS, ids=["plain", "swap", "column tiles", "grouped rows"])
@pytest.mark.parametrize(("name", "group"), [("none", 0), ("int8", 0), ("int4", 32)])
def test_options_of_the_grouped_kernels_don_t_change_the_result(tiles, name, group, monkeypatch):
    """A half block runs as such (BLOCK_M 64 with swapped operands), column tiles that don't divide N end where N ends."""
    case = random_case(40, 2, 3, 64, 96, seed=17)
    stored, backend = store(case, name, group or 128), FusedMoeBackend()
    choice = Choice("grouped", 64 if tiles.swap else 16, tiles, tiles)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    assert relative_error(run_step(backend, case, stored), stored.oracle(case)) < 1e-5


@pytest.mark.parametrize("preload", [1, 2])
@pytest.mark.parametrize("wide", [False, True])
def test_options_of_the_direct_kernels_don_t_change_the_result(preload, wide, monkeypatch):
    case = random_case(2, 3, 4, 160, 80, seed=18)
    stored, backend = store(case, "int8"), FusedMoeBackend()
    choice = Choice("direct", 1, *(Tiles(32, 64, 4, preload=preload, wide=wide),) * 2)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    assert relative_error(run_step(backend, case, stored), stored.oracle(case)) < 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
def test_missing_routes_add_exactly_zero_and_change_nobody_else(kernel):
    case = random_case(6, 2, 4, 64, 48, seed=7)
    stored = store(case, "none", num_slots=6)  # two slots hold nothing but NaN
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    full = run_step(backend, case, stored)
    ids = case.ids.clone()
    ids[1], ids[4, 0] = -1, -1
    case.weights[1] = float("nan")
    case.ids.copy_(ids)
    some = run_step(backend, case, stored)
    assert torch.equal(some[1], torch.zeros_like(some[1]))
    others = [0, 2, 3, 5]
    assert torch.equal(some[others], full[others])
    assert relative_error(some[4], stored.oracle(case)[4]) < 1e-5
    case.ids.fill_(-1)
    assert torch.equal(run_step(backend, case, stored), torch.zeros_like(full))


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tokens_then_some(kernel):
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    empty, case = random_case(0, 2, 3, 64, 48), random_case(2, 2, 3, 64, 48)
    assert run_step(backend, empty, store(empty, "none")).shape == (0, 64)
    stored = store(case, "none")
    assert relative_error(run_step(backend, case, stored), stored.oracle(case)) < 1e-5


@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_to_one_expert(expert):
    case = random_case(20, 1, 4, 64, 48, seed=8)
    case.ids.fill_(expert)
    stored = store(case, "none")
    assert relative_error(run_step(FusedMoeBackend(), case, stored), stored.oracle(case)) < 1e-5


def test_ids_above_255():
    case = random_case(2, 2, 300, 32, 32, seed=9)
    case.ids.copy_(torch.tensor([[299, 256], [255, 299]]))
    stored = store(case, "none")
    for threshold in KERNELS.values():
        y = run_step(FusedMoeBackend(small_m_threshold=threshold), case, stored)
        assert relative_error(y, stored.oracle(case)) < 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_zero_tokens_and_zero_channels_are_exact(kernel, name):
    case = random_case(3, 2, 2, 64, 64, seed=10)
    case.x[1] = 0
    case.gate_up[:, 5] = 0
    case.down[:, 7] = 0
    stored = store(case, name, 32)
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, stored)
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert torch.equal(y[:, 7], torch.zeros_like(y[:, 7]))


@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_the_relative_error_does_not_depend_on_the_size_of_weights(scale):
    case = random_case(3, 2, 2, 64, 64, seed=11)
    case.down.mul_(scale)
    for name in ("fp8", "int8", "int4", "mxfp4"):
        stored = store(case, name, 32)
        y = run_step(FusedMoeBackend(), case, stored)
        assert relative_error(y, stored.oracle(case)) < stored.tolerance


def test_the_input_is_left_alone_and_the_output_is_nobody_elses_memory():
    case = random_case(3, 2, 4, 64, 48, seed=12)
    stored, backend = store(case, "none"), FusedMoeBackend(small_m_threshold=0)
    before = case.x.clone()
    first = run_step(backend, case, stored)
    kept = first.clone()
    backend.workspace(case.x.device).poison(0x7F)
    run_step(backend, random_case(3, 2, 4, 64, 48, seed=13), stored)
    assert torch.equal(case.x, before)
    assert torch.equal(first, kept)


def test_ranks_add_up_to_the_whole():
    """Expert parallelism as the kernels see it: each rank has some experts in slots of its own order, the rest are -1."""
    case = random_case(5, 3, 8, 64, 48, seed=14)
    expected = store(case, "none").oracle(case)
    for num_ranks in (2, 4):
        total = torch.zeros_like(case.x, dtype=torch.float64)
        for rank in range(num_ranks):
            mine = torch.arange(rank, 8, num_ranks).flip(0)
            slot_of = torch.full((8,), -1)
            slot_of[mine] = torch.arange(len(mine))
            local = type(case)(case.x, case.gate_up[mine], case.down[mine], case.ids, case.weights)
            stored, backend = store(local, "none"), FusedMoeBackend(small_m_threshold=0)
            step = backend.begin(case.x, Routing(case.ids, case.weights), stored.problem(case))
            step.run(Placement(stored.slab, slot_of[case.ids.long()].int()))
            total += step.finish().double()
        assert relative_error(total, expected) < 1e-5


def test_forward_equals_the_torch_backend():
    case = random_case(37, 2, 8, 64, 48, seed=15)
    logits = torch.randn(37, 8, generator=torch.Generator().manual_seed(0))
    arguments = (case.x, case.gate_up, case.down, logits, 2, True)
    assert relative_error(FusedMoeBackend().forward(*arguments), TorchMoeBackend().forward(*arguments)) < 1e-5


def test_bfloat16_is_refused_in_the_interpreter():
    case = random_case(2, 2, 4, 64, 48, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter"):
        FusedMoeBackend().forward(case.x, case.gate_up, case.down, torch.randn(2, 4), 2, True)


def test_canaries_behind_every_buffer_survive():
    """Buffers cut out of larger ones, whose ends no kernel may touch."""
    case = random_case(7, 3, 5, 64, 48, dtype=torch.float16, seed=16)
    stored = store(case, "fp8")
    backend = FusedMoeBackend(small_m_threshold=0)
    problem = stored.problem(case)
    buffers = backend.workspace(case.x.device).claim(problem)
    backend.workspace(case.x.device).poison(0x55)
    run_step(backend, case, stored)
    positions = max_blocks(21, 5, 16) * 16
    beyond = [
        buffers.sorted_R[positions:],
        buffers.served_R[21:],
        buffers.activated_PF[positions:],
        buffers.x_scale_T[7:],
        buffers.rows[21 * 64 * 2 :],
    ]
    for tail in beyond:
        assert bool((tail.contiguous().view(torch.uint8) == 0x55).all())
