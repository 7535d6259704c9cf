"""The decode kernels on 32-bit words, in Triton's interpreter: formats, groups, tails, waves, biases."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.kernels.launch_words import in_lane_order
from minisgl.moe.kernels.word_loads import lane_order
from minisgl.moe.select import Choice, Tiles
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import random_case, relative_error

FORMATS = [
    ("int8", 0, True),
    ("fp8", 0, True),
    ("fp8_block", 128, True),
    ("int4", 128, True),
    ("int4", 64, False),
    ("int4", 32, True),
    ("mxfp4", 32, True),
]


def backend_with(up: Tiles, down: Tiles, monkeypatch) -> FusedMoeBackend:
    backend, choice = FusedMoeBackend(), Choice("direct", 1, up, down)
    monkeypatch.setattr(backend, "choose", lambda problem, device: choice)
    return backend


@pytest.mark.parametrize("preload", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "group", "symmetric"), FORMATS)
def test_every_format_agrees_with_float64(name, group, symmetric, dtype, preload, monkeypatch):
    """Steps that don't divide D and F, blocks that divide neither; NaN wherever the slab holds no weight."""
    model_dim, hidden_dim = (384, 128) if group == 128 else (320, 192)
    case = random_case(2, 2, 3, model_dim, hidden_dim, dtype=dtype, seed=1)
    stored = store(case, name, group, symmetric)
    backend = backend_with(
        Tiles(32, 256, 4, preload=preload), Tiles(64, 128, 4, preload=preload), monkeypatch
    )
    y = run_step(backend, case, stored)
    assert relative_error(y, stored.oracle(case)) < (2e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize(
    ("up", "down"),
    [(Tiles(32, 128, 4), Tiles(64, 256, 4)), (Tiles(16, 128, 4), Tiles(32, 128, 4, preload=2))],
)
@pytest.mark.parametrize(
    ("name", "group", "symmetric"), [("int4", 128, True), ("int4", 64, False), ("mxfp4", 32, True)]
)
def test_activated_rows_in_lane_order(name, group, symmetric, up, down, monkeypatch):
    """4 bits with hidden dims in whole blocks of 256; every other format leaves columns where they are."""
    case = random_case(2, 2, 3, 128, 512, dtype=torch.float16, seed=6)
    stored = store(case, name, group, symmetric)
    assert in_lane_order(stored.problem(case), Choice("direct", 1, up, down), case.x.device)
    backend = backend_with(up, down, monkeypatch)
    y = run_step(backend, case, stored)
    assert relative_error(y, stored.oracle(case)) < 2e-3
    assert torch.equal(run_step(backend, case, stored, waves=2), y)


def test_lane_order_reads_sixteen_bytes_of_eight_lanes_at_a_time():
    columns = torch.arange(768)
    places = lane_order.fn(columns)
    assert torch.equal(places.sort().values, columns)
    lanes = places.view(3, 8, 4, 8)  # [block, lane, load, column]
    wanted = columns.view(3, 4, 8, 8).transpose(1, 2)  # of a load, lanes follow one another
    assert torch.equal(lanes, wanted)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize(("name", "group"), [("int8", 0), ("fp8_block", 128), ("int4", 32), ("mxfp4", 32)])
def test_waves_give_the_bits_of_one_wave(name, group, top_k, monkeypatch):
    case = random_case(3, top_k, 5, 128, 128, dtype=torch.float16, seed=2)
    stored = store(case, name, group or 128)
    backend = backend_with(Tiles(64, 128, 4), Tiles(64, 128, 4), monkeypatch)
    resident = run_step(backend, case, stored)
    for waves in (1, 3):
        assert torch.equal(run_step(backend, case, stored, waves=waves), resident)


@pytest.mark.parametrize(("name", "group"), [("int8", 0), ("fp8", 0), ("int4", 32), ("mxfp4", 32)])
def test_blocks_that_divide_neither_dimension_and_biases(name, group, monkeypatch):
    case = random_case(2, 2, 3, 96, 160, bias=True, seed=3)
    stored = store(case, name, group or 128)
    backend = backend_with(Tiles(64, 64, 4), Tiles(64, 64, 4), monkeypatch)
    y = run_step(backend, case, stored, "gpt_oss")
    assert relative_error(y, stored.oracle(case, "gpt_oss")) < 1e-5


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_that_are_no_whole_words_take_the_kernels_on_single_codes(name):
    case = random_case(2, 2, 3, 66, 54, seed=4)
    stored = store(case, name)
    y = run_step(FusedMoeBackend(small_m_threshold=64), case, stored)
    assert relative_error(y, stored.oracle(case)) < 1e-5


def test_all_codes_of_e4m3(monkeypatch):
    """Every finite code, subnormal ones too, as a weight of down."""
    case = random_case(1, 1, 1, 256, 4, seed=5)
    stored = store(case, "fp8")
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    stored.slab.parts["down"].view(torch.uint8)[0] = codes[:, None]
    stored.slab.parts["down_scale"][0] = 1.0
    stored.down[0] = codes.view(torch.float8_e4m3fn).float()[:, None]
    backend = backend_with(Tiles(4, 128, 4), Tiles(64, 32, 4), monkeypatch)
    y = run_step(backend, case, stored)
    assert relative_error(y, stored.oracle(case)) < 1e-5
    assert bool((y.abs().squeeze(0)[[1, 2, 129]] > 0).all())
