"""The fused MoE backend on a GPU, in bf16: every format and kernel, graphs, races, growth, offsets past 2^31, tuning.

Compiling takes most of the time: run it with `-n 8`.
"""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.autotune import Tuner
from minisgl.moe.base import Placement, Routing, RoutingRule, Slab, apply_rule
from minisgl.moe.fused import FusedMoeBackend, align_torch, moe_align_block_size, quantize_rows_torch
from minisgl.moe.kernels import launch
from minisgl.moe.records import Records
from minisgl.moe.select import Choice, DeviceLimits, Tiles
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.gpu.moe.replays import assert_replays_equal_eager_runs
from tests.interpret.moe.steps import Stored, run_step, store
from tests.moe_oracle import MoeCase, random_case, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FORMATS = [
    ("none", 0, True),
    ("fp8", 0, True),
    ("int8", 0, True),
    ("int4", 128, True),
    ("int4", 64, False),
    ("int4", 32, True),
    ("fp8_block", 128, True),
    ("mxfp4", 32, True),
]
KERNELS = {"grouped": 0, "direct": 64}


def needs_fp8(name: str) -> None:
    if name.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")


def cuda_case(*args, **kwargs) -> MoeCase:
    case = random_case(*args, dtype=torch.bfloat16, **kwargs)
    tensors = {name: getattr(case, name) for name in vars(case)}
    return MoeCase(**{name: t.cuda() if t is not None else None for name, t in tensors.items()})


def expected(case: MoeCase, stored: Stored, activation: str = "silu") -> torch.Tensor:
    """The definition, in float32 on the device."""
    step = TorchMoeBackend().begin(case.x, Routing(case.ids, case.weights), stored.problem(case, activation))
    step.run(Placement(stored.slab, case.ids))
    return step.finish()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "group", "symmetric"), FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300])
def test_every_format_agrees_with_the_definition(kernel, name, group, symmetric, num_tokens):
    needs_fp8(name)
    if kernel == "direct" and num_tokens > KERNELS[kernel]:
        pytest.skip("direct serves decode")
    case = cuda_case(num_tokens, 4, 12, 512, 384, seed=num_tokens)
    stored = store(case, name, group, symmetric, "cuda")
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    run_step(backend, case, stored)
    backend.workspace(case.x.device).poison(0xFF)
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("name", "group"), [("none", 0), ("int8", 0), ("int4", 32), ("mxfp4", 32), ("fp8_block", 128)]
)
@pytest.mark.parametrize("dims", [(192, 96), (320, 704), (2880, 96)])
def test_tails(kernel, name, group, dims):
    needs_fp8(name)
    case = cuda_case(7, 2, 3, *dims, seed=1)
    stored = store(case, name, group or 128, device="cuda")
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, stored)
    assert relative_error(y, expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("hidden_dim", [80, 192, 320, 704])
@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_block_scales_where_128_does_not_divide(hidden_dim, num_tokens):
    needs_fp8("fp8_block")
    case = cuda_case(num_tokens, 2, 4, 256, hidden_dim, seed=2)
    stored = store(case, "fp8_block", device="cuda")
    for threshold in KERNELS.values():
        y = run_step(FusedMoeBackend(small_m_threshold=threshold), case, stored)
        assert relative_error(y, expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("activation", ["silu", "gelu", "gpt_oss"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_biases_and_activations(kernel, activation):
    case = cuda_case(9, 2, 4, 256, 128, bias=True, seed=3)
    stored = store(case, "mxfp4", 32, device="cuda")
    y = run_step(FusedMoeBackend(small_m_threshold=KERNELS[kernel]), case, stored, activation)
    assert relative_error(y, expected(case, stored, activation)) < stored.tolerance


OPTIONS = {
    "plain": Tiles(64, 64, 4, 3),
    "swap": Tiles(64, 64, 4, 3, swap=True),
    "descriptors": Tiles(64, 64, 4, 3, tma=True),
    "swap, descriptors": Tiles(64, 64, 4, 3, swap=True, tma=True),
    "column tiles": Tiles(64, 64, 4, 3, tiles_n=3),
    "column tiles, swap, descriptors": Tiles(64, 64, 4, 3, swap=True, tma=True, tiles_n=2),
    "shared row blocks": Tiles(64, 64, 8, 3, group_m=8),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize(("name", "group"), [("none", 0), ("fp8", 0), ("int4", 128)])
def test_options_of_the_grouped_kernels_don_t_change_the_result(option, block_m, name, group, monkeypatch):
    needs_fp8(name)
    tiles = OPTIONS[option]
    if tiles.tma and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need compute capability 9.0")
    case = cuda_case(150, 2, 4, 256, 384, seed=4)
    stored, backend = store(case, name, group or 128, device="cuda"), FusedMoeBackend()
    choice = Choice("grouped", block_m, tiles, tiles)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("group", "block_k"), [(128, 64), (128, 128), (64, 64), (64, 128)])
def test_int4_codes_multiplied_as_they_are(group, block_k, swap, block_m, symmetric):
    """Steps of half a group, a group, and two groups, which have no sums; rows far from zero, where sums weigh most."""
    case = cuda_case(70, 4, 8, 512, 768, seed=6)
    case.x.add_(3.0)
    stored = store(case, "int4", group, symmetric, "cuda")
    tiles = Tiles(64, block_k, 4, 3, swap=swap)
    choice = Choice("grouped", block_m, tiles, tiles)
    backend = FusedMoeBackend(records=lambda problem, limits: {problem.num_tokens: choice})
    run_step(backend, case, stored)
    backend.workspace(case.x.device).poison(0xFF)
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "fp8", "int8", "int4"])
def test_waves_give_the_bits_of_one_wave(kernel, name):
    needs_fp8(name)
    case = cuda_case(12, 4, 9, 256, 384, seed=5)
    stored, backend = store(case, name, device="cuda"), FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    resident = run_step(backend, case, stored)
    for waves in (1, 2, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


@pytest.mark.parametrize("kernel", KERNELS)
def test_missing_routes_add_exactly_zero_and_change_nobody_else(kernel):
    case = cuda_case(20, 2, 4, 256, 128, seed=6)
    stored = store(case, "none", device="cuda", num_slots=6)
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    full = run_step(backend, case, stored)
    case.ids[3] = -1
    some = run_step(backend, case, stored)
    others = torch.arange(20, device="cuda") != 3
    assert torch.equal(some[3], torch.zeros_like(some[3]))
    assert torch.equal(some[others], full[others])


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tokens_leave_no_sticky_error(kernel):
    backend = FusedMoeBackend(small_m_threshold=KERNELS[kernel])
    empty, case = cuda_case(0, 2, 3, 256, 128), cuda_case(2, 2, 3, 256, 128)
    assert run_step(backend, empty, store(empty, "none", device="cuda")).shape == (0, 256)
    assert backend.route(torch.empty(0, 8, device="cuda"), RoutingRule(2)).ids_TK.shape == (0, 2)
    torch.cuda.synchronize()
    stored = store(case, "none", device="cuda")
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance


@pytest.mark.parametrize("name", ["none", "fp8", "int4"])
def test_a_thousand_replays_with_changing_inputs_equal_eager_runs(name):
    needs_fp8(name)
    case = cuda_case(8, 4, 16, 256, 256, seed=7)
    stored, backend = store(case, name, device="cuda"), FusedMoeBackend()
    assert_replays_equal_eager_runs(backend, case, stored, replays=1000)


@pytest.mark.parametrize("num_tokens", [2, 64, 500])
@pytest.mark.parametrize("name", ["none", "fp8", "int8", "int4"])
def test_a_thousand_repeats_are_bitwise_equal(name, num_tokens):
    needs_fp8(name)
    case = cuda_case(num_tokens, 4, 16, 256, 256, seed=8)
    stored, backend = store(case, name, device="cuda"), FusedMoeBackend()
    first = run_step(backend, case, stored)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (run_step(backend, case, stored) != first).any()
    assert int(different) == 0


def test_a_captured_graph_outlives_the_growth_of_the_workspace():
    small, large = cuda_case(8, 4, 8, 256, 256, seed=9), cuda_case(4096, 4, 8, 256, 256, seed=10)
    stored, backend = store(small, "none", device="cuda"), FusedMoeBackend()
    before = run_step(backend, small, stored).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_step(backend, small, stored)
    run_step(backend, large, stored)
    fresh = torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
    backend.workspace(small.x.device).poison(0xFF)
    graph.replay()
    assert torch.equal(y, before)
    del fresh


def test_a_token_alone_and_in_company_agree():
    case = cuda_case(64, 4, 8, 512, 256, seed=11)
    stored, backend = store(case, "none", device="cuda"), FusedMoeBackend()
    together = run_step(backend, case, stored)
    alone = MoeCase(case.x[:1], case.gate_up, case.down, case.ids[:1], case.weights[:1])
    assert relative_error(run_step(backend, alone, stored), together[:1]) < stored.tolerance


@pytest.mark.parametrize("experts", [1, 5, 60, 100, 256, 257, 1030])
@pytest.mark.parametrize("routes", [1, 40, 600, 2049, 40_000])
def test_align_equals_its_twin(experts, routes):
    ids = torch.randint(-1, experts, (routes,), device="cuda", dtype=torch.int32)
    sorted_ids, expert_ids = moe_align_block_size(ids, 16, experts)
    expected_ids, expected_experts = align_torch(ids.cpu(), 16, experts)
    assert torch.equal(sorted_ids.cpu(), expected_ids)
    assert torch.equal(expert_ids.cpu(), expected_experts)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 3000])
@pytest.mark.parametrize("experts", [8, 60, 128, 257, 512])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
def test_router_equals_the_definition_and_the_choice_of_float64(num_tokens, experts, scoring):
    logits = torch.randn(num_tokens, experts, device="cuda").bfloat16()
    rule = RoutingRule(min(8, experts), scoring=scoring)
    actual, definition = FusedMoeBackend().route(logits, rule), apply_rule(logits, rule)
    assert torch.equal(actual.ids_TK, definition.ids_TK)
    torch.testing.assert_close(actual.weights_TK, definition.weights_TK, rtol=1e-5, atol=1e-7)
    choice = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    assert torch.equal(actual.ids_TK.long(), choice)


@pytest.mark.parametrize("num_tokens", [3, 600])
def test_fp8_codes_are_those_of_the_definition(num_tokens):
    needs_fp8("fp8")
    case = cuda_case(num_tokens, 4, 8, 512, 256, seed=12)
    case.x[1] = 0
    stored, backend = store(case, "fp8", device="cuda"), FusedMoeBackend(small_m_threshold=0)
    problem = stored.problem(case)
    buffers = backend.workspace(case.x.device).claim(problem)
    launch.align(case.x, case.ids, 8, problem, 16, True, buffers)
    codes, scale = quantize_rows_torch(case.x)
    assert torch.equal(buffers.x_scale_T[:num_tokens], scale)
    actual = buffers.x_ready(case.x, "fp8").float()
    close = (
        actual - codes.float()
    ).abs() <= 0.07 * codes.float().abs()  # one code, where a division rounds otherwise
    assert bool(close.all())
    assert float((actual != codes.float()).float().mean()) < 1e-3


def test_row_offsets_past_two_to_the_31():
    """131,073 tokens x 8 x 2048: rows 0, 65,536 and 131,072 are right; so are grids above 65,536."""
    if torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 20 GB of device memory")
    num_tokens, sample = 131_073, torch.tensor([0, 65_536, 131_072], device="cuda")
    small = cuda_case(3, 8, 16, 2048, 256, seed=13)
    stored = store(small, "none", device="cuda")
    x = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(16)[:8] for _ in range(64)]).int().cuda().repeat(2049, 1)[:num_tokens]
    weights = torch.rand(num_tokens, 8, device="cuda")
    case = MoeCase(x, small.gate_up, small.down, ids.contiguous(), weights)
    y = run_step(FusedMoeBackend(), case, stored)
    few = MoeCase(x[sample], small.gate_up, small.down, ids[sample], weights[sample])
    assert relative_error(y[sample], expected(few, stored)) < stored.tolerance


def test_expert_offsets_past_two_to_the_31():
    """A slab of more than 2^31 weights: the last slot is found."""
    if torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 20 GB of device memory")
    case = cuda_case(4, 1, 1, 2048, 1024, seed=14)
    one = store(case, "none", device="cuda")
    num_slots = (1 << 31) // (one.slab.layout.nbytes // 2) + 2
    records = torch.empty((num_slots, one.slab.layout.nbytes), dtype=torch.uint8, device="cuda")
    records[-1] = one.slab.records_SB[0]
    slab = Slab.of_records(one.slab.format, one.slab.shape, one.slab.layout, records)
    last = Stored(slab, one.gate_up, one.down, one.tolerance, 0)
    for threshold in KERNELS.values():
        backend = FusedMoeBackend(small_m_threshold=threshold)
        expected_y = run_step(backend, case, one)
        moved = MoeCase(case.x, case.gate_up, case.down, case.ids + num_slots - 1, case.weights)
        assert torch.equal(run_step(backend, moved, last), expected_y)


def test_tuning_measures_a_bucket_once_on_the_routes_at_hand(tmp_path):
    case = cuda_case(8, 4, 8, 256, 256, seed=15)
    stored = store(case, "none", device="cuda")
    limits = DeviceLimits.of(case.x.device)
    tuner = Tuner(limits, Records(tmp_path), most=3)
    backend = FusedMoeBackend(tuner=tuner)
    first = run_step(backend, case, stored)
    problem = stored.problem(case)
    assert not tuner.wants(problem, case.ids)
    assert backend.choose(problem, case.x.device) == Records(tmp_path).lookup(problem, limits)[8]
    assert relative_error(run_step(backend, case, stored), first) < stored.tolerance


def test_tuning_drops_what_a_pretended_consumer_card_can_t_hold():
    case = cuda_case(64, 4, 8, 256, 256, seed=16)
    stored = store(case, "none", device="cuda")
    real = DeviceLimits.of(case.x.device)
    small = DeviceLimits("pretended", real.capability, 101_376, real.num_multiprocessors)
    backend = FusedMoeBackend(tuner=Tuner(small, Records(), most=4), records=lambda problem, limits: None)
    run_step(backend, case, stored)
    choice = backend.tuner.records.lookup(stored.problem(case), small)[64]
    backend.choose = lambda problem, device: choice
    assert relative_error(run_step(backend, case, stored), expected(case, stored)) < stored.tolerance
