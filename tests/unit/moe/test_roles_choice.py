"""Where kernels whose warps have roles are offered, and what is chosen where they can't be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from minisgl.moe.base import ExpertShape, Problem
from minisgl.moe.candidates import candidates, grouped_shared_bytes, neighbours
from minisgl.moe.records import Records, without_roles
from minisgl.moe.select import (
    Choice,
    DeviceLimits,
    can_have_roles,
    has_gluon,
    roles_tiles,
    select,
)

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232_448, 132, gluon=True)
OTHERS = {
    "another Triton": replace(H200, gluon=False),
    "an older card": replace(H200, capability=(8, 0)),
    "a newer card": replace(H200, capability=(12, 0), shared_bytes=101_376),
}


def problem(format_name: str = "bf16", dims: tuple[int, int] = (2048, 768), **changes) -> Problem:
    group = {"int4": 128, "mxfp4": 32, "fp8_block": 128}.get(format_name, 0)
    plain = Problem(4096, 8, 128, ExpertShape(*dims), format_name, torch.bfloat16, "silu", group)
    return replace(plain, **changes)


REFUSED = {
    "int8": problem("int8"),
    "int4 in groups of 64": problem("int4", group_size=64),
    "int4 and float16": problem("int4", dtype=torch.float16),
    "mxfp4 and float16": problem("mxfp4", dtype=torch.float16),
    "block scales": problem("fp8_block"),
    "float32": problem("fp32", dtype=torch.float32),
    "biases": problem(shape=ExpertShape(2048, 768, bias=True)),
    "another activation": problem(activation="gelu"),
    "128 does not divide F": problem(dims=(2048, 704)),
    "256 does not divide D": problem(dims=(2880, 768)),
}


def offered(wanted: Problem, limits: DeviceLimits) -> bool:
    chosen = select(wanted, limits)
    found = [tiles for _, _, ups, downs in candidates(wanted, limits) for tiles in (*ups, *downs)]
    assert any(tiles.roles for tiles in found) == (chosen.gate_up.roles or chosen.down.roles)
    return chosen.gate_up.roles and chosen.down.roles


@pytest.mark.parametrize("format_name", ["bf16", "fp16", "fp8"])
def test_offered_on_hopper_for_blocks_of_128_rows(format_name):
    dtype = torch.float16 if format_name == "fp16" else torch.bfloat16
    wanted = problem(format_name, dtype=dtype)
    assert offered(wanted, H200)
    assert select(wanted, H200).block_m == 128
    assert not offered(replace(wanted, num_tokens=256), H200)
    for limits in OTHERS.values():
        assert not offered(wanted, limits)


@pytest.mark.parametrize(
    ("num_tokens", "block_m"), [(80, 32), (256, 32), (512, 128), (1024, 128), (4096, 128)]
)
@pytest.mark.parametrize("format_name", ["int4", "mxfp4"])
def test_of_4_bit_weights_offered_from_a_few_rows_a_slot_on(format_name, num_tokens, block_m):
    if (format_name, num_tokens) == ("mxfp4", 80):
        block_m = 16  # five rows a slot: unpacking for 32 takes longer
    wanted = problem(format_name, num_tokens=num_tokens)
    assert offered(wanted, H200)
    assert select(wanted, H200).block_m == block_m
    for limits in OTHERS.values():
        assert not offered(wanted, limits)


@pytest.mark.parametrize("format_name", ["int4", "mxfp4"])
def test_a_record_of_4_bit_weights_with_roles_gives_the_heuristic_s_tiles_elsewhere(tmp_path, format_name):
    wanted = problem(format_name)
    choice = Choice("grouped", 128, *roles_tiles(wanted))
    card = replace(H200, name="some card")
    Records(tmp_path).add(wanted, card, choice, 1.0)
    assert Records(tmp_path).lookup(wanted, card) == {4096: choice}
    without = replace(card, gluon=False)
    assert Records(tmp_path).lookup(wanted, without) == {4096: select(wanted, without)}


@pytest.mark.parametrize("reason", REFUSED)
def test_not_offered_where_they_can_t_multiply(reason):
    assert not can_have_roles(REFUSED[reason], H200)
    assert not offered(REFUSED[reason], H200)


@pytest.mark.parametrize("format_name", ["bf16", "fp8"])
def test_their_buffers_fit_and_neighbours_keep_roles(format_name):
    wanted = problem(format_name)
    for gemm, halves, tiles in zip(("gate_up", "down"), (2, 1), roles_tiles(wanted), strict=True):
        around = list(neighbours(wanted, H200, "grouped", 128, gemm, tiles))
        assert around
        for one in (tiles, *around):
            assert one.roles
            assert grouped_shared_bytes(wanted, one, 128, halves) <= H200.shared_bytes - 8192


def test_a_record_with_roles_gives_the_same_tiles_elsewhere(tmp_path):
    wanted, choice = problem(), Choice("grouped", 128, *roles_tiles(problem()))
    card = replace(H200, name="some card")
    Records(tmp_path).add(wanted, card, choice, 1.0)
    assert Records(tmp_path).lookup(wanted, card) == {4096: choice}
    plain = Records(tmp_path).lookup(wanted, replace(card, gluon=False))
    assert plain is not None
    assert plain == {4096: without_roles(choice, wanted, H200)}
    assert (plain[4096].gate_up.block_n, plain[4096].gate_up.num_warps) == (128, 8)
    assert not plain[4096].gate_up.roles


def test_only_the_triton_they_were_written_for_is_asked():
    assert has_gluon() == (triton.__version__.split(".")[:2] == ["3", "6"])
    assert not DeviceLimits.of(torch.device("cpu")).gluon
