"""The kernels for few rows a slot, in Triton's interpreter: tails, blocks of every height, waves, offloading, biases, NaN."""

from __future__ import annotations

import pytest
import torch

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, RoutingRule
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.kernels import launch_few_rows
from minisgl.moe.select import Choice, Tiles
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.overlap import Serial
from minisgl.moe.store.pinned import HostMemory
from minisgl.moe.store.streaming import TransientSlots
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import random_case, relative_error
from tests.unit.moe.late_copies import LateCopies


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
    ("model_dim", "hidden_dim", "block_m"), [(384, 128, 8), (128, 384, 16), (256, 256, 32)]
)
def test_agrees_with_float64(model_dim, hidden_dim, block_m, symmetric, monkeypatch):
    """Blocks that divide neither dimension, steps that pass the end, NaN wherever no weight is, a poisoned workspace."""
    num_tokens = 17 if block_m == 32 else 5
    case = random_case(num_tokens, 2, 3, model_dim, hidden_dim, dtype=torch.float16, seed=1)
    stored = store(case, "int4", symmetric=symmetric)
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


def test_waves_give_the_bits_of_one_wave(monkeypatch):
    case = random_case(5, 3, 4, 128, 128, dtype=torch.float16, seed=4)
    stored = store(case, "int4")
    backend = backend_with(monkeypatch)
    resident = run_step(backend, case, stored)
    for waves in (1, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


def offloaded_and_resident() -> tuple[DeviceStore, ResidentStore]:
    shape, weight_format = ExpertShape(128, 128), get_format("int4", torch.float16, 128)
    host = HostMemory().allocate(8, weight_format.bytes_per_expert(shape))
    offloaded = DeviceStore(
        host, shape, weight_format, 4, 3, "cpu", lambda slab: TransientSlots(slab, 2, LateCopies), Serial()
    )
    offloaded.slab.records_SB.fill_(0xFF)
    offloaded.fill_random(seed=0, std=0.15)
    resident = ResidentStore(8, shape, weight_format, "cpu")
    resident.records_EB.copy_(offloaded.records_EB)
    return offloaded, resident


@pytest.mark.parametrize(
    ("num_tokens", "may_wait", "early"),
    [
        (1, False, [True, False]),  # hits, then what was fetched
        (2, False, [True, False, False]),  # more experts than slots
        (2, True, [True] * 5),  # streamed, one expert at a time
    ],
)
def test_an_offloaded_layer_gives_the_bits_of_a_resident_one(num_tokens, may_wait, early, monkeypatch):
    """And down doesn't start early where it reads what may have come just before it."""
    offloaded, resident = offloaded_and_resident()
    router = Router(8, 128, RoutingRule(3), dtype=torch.float16)
    router.weight.copy_(torch.randn(8, 128, generator=torch.Generator().manual_seed(7)))
    seen, problems, down = [], [], launch_few_rows.down
    monkeypatch.setattr(launch_few_rows, "down", lambda *args: (seen.append(not args[-1]), down(*args)))
    place = DeviceStore.place
    monkeypatch.setattr(offloaded, "place", lambda routing, *_: place(offloaded, routing, may_wait=may_wait))
    layers = []
    for store_of_layer in (resident, offloaded):
        backend = backend_with(monkeypatch)
        choose = backend.choose
        monkeypatch.setattr(
            backend, "choose", lambda *key, choose=choose: (problems.append(key), choose(*key))[1]
        )
        layers.append(MoELayer(router, store_of_layer, backend))
    for step in range(3):
        x = torch.randn(num_tokens, 128, dtype=torch.float16, generator=torch.Generator().manual_seed(step))
        expected = layers[0](x)
        seen.clear()
        assert torch.equal(layers[1](x), expected)
        if step == 0:
            assert seen == early
        assert problems[-1] == problems[-2], "both choose for the same problem"


@pytest.mark.parametrize("activation", ["silu", "gelu", "gpt_oss"])
def test_biases_and_activations(activation, monkeypatch):
    case = random_case(4, 2, 3, 128, 256, bias=True, seed=5)
    stored = store(case, "int4")
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
