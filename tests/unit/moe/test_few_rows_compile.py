"""The kernels for few rows compile for GPUs that aren't here, without spills, and tiles lie in lanes as products want them.

`kernels.fragments` counts on that layout, and Triton decides it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from minisgl.moe.base import ExpertShape, Problem
from minisgl.moe.candidates import candidates, neighbours
from minisgl.moe.kernels import launch_few_rows
from minisgl.moe.kernels.precompile import CompileTask, compile_choice, empty_slab
from minisgl.moe.records import Records
from minisgl.moe.select import (
    FEW_ROWS_LARGEST_BLOCK_M,
    FEW_ROWS_PAIR,
    Choice,
    Tiles,
    few_rows_heuristic,
    select,
)
from minisgl.moe.workspace import Workspace, buffer_specs, max_blocks
from tests.unit.moe.test_place_compile import spilled_bytes
from tests.unit.moe.test_words_compile import H200, compiled  # noqa: F401

PROBLEM = Problem(64, 8, 128, ExpertShape(2048, 768), "int4", torch.bfloat16, "silu", 128)
ONE_WARP = Tiles(16, 128, 1, preload=2), Tiles(32, 128, 1, preload=2)


def layouts_of_packed(ttgir: str, count: int) -> set[str]:
    """Layouts of the tiles that assembly takes `count` elements at a time."""
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    lines = [line for line in ttgir.splitlines() if f"packed_element = {count} " in line]
    return {named[name] for line in lines for name in re.findall(r"tensor<[^#]*, (#\w+)>", line)}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dims", [(2048, 768), (384, 128), (128, 256)])
def test_a_quad_holds_a_row(dims, symmetric, compiled, tmp_path):  # noqa: F811
    """Also where a row is one group, so that the scales of different rows are neighbours."""
    task = replace(PROBLEM, shape=ExpertShape(*dims))
    compile_choice(CompileTask(task, Choice("few_rows", 8, *ONE_WARP), symmetric))
    assert set(compiled) == {"few_rows_gate_up_kernel", "few_rows_down_kernel"}
    for kernel in compiled.values():
        assert task != PROBLEM or spilled_bytes(kernel, tmp_path) == 0
        layouts = layouts_of_packed(kernel.asm["ttgir"], 4)
        assert len(layouts) == 1
        quads = "sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [1, 1], order = [1, 0]"
        assert quads in next(iter(layouts))
        assert layouts_of_packed(kernel.asm["ttgir"], 1) == {layouts.pop().replace("[1, 4], t", "[1, 1], t")}
        assert "mma.sync" in kernel.asm["ptx"]


@pytest.mark.parametrize("warps", [2, 4])
def test_each_of_several_warps_holds_eight_rows(warps, compiled):  # noqa: F811
    tiles = Tiles(16 * warps, 128, warps, 2, preload=2), Tiles(32 * warps, 128, warps, preload=2)
    compile_choice(CompileTask(PROBLEM, Choice("few_rows", 8, *tiles)))
    for kernel in compiled.values():
        for layout in layouts_of_packed(kernel.asm["ttgir"], 4):
            assert f"sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [{warps}, 1]" in layout


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_the_heuristic_doesn_t_spill(compiled, tmp_path):  # noqa: F811
    compile_choice(CompileTask(PROBLEM, few_rows_heuristic(PROBLEM)))
    for kernel in compiled.values():
        assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("block_m", [16, 32])
def test_every_height_compiles(block_m, compiled):  # noqa: F811
    compile_choice(CompileTask(PROBLEM, Choice("few_rows", block_m, *ONE_WARP), symmetric=False))
    assert set(compiled) == {"few_rows_gate_up_kernel", "few_rows_down_kernel"}


def test_offered_for_int4_in_bfloat16_and_allowed_up_to_a_number_of_tokens():
    offered = {kernel for kernel, *_ in candidates(PROBLEM, H200)}
    assert "few_rows" in offered
    for changes in (
        {"dtype": torch.float16}, {"format": "int8", "group_size": 0}, {"num_tokens": 2048}, {"group_size": 64},
        {"group_size": 32},
    ):  # fmt: skip
        assert "few_rows" not in {kernel for kernel, *_ in candidates(replace(PROBLEM, **changes), H200)}
        assert select(replace(PROBLEM, **changes), H200).kernel == "grouped"
    assert "few_rows" not in {kernel for kernel, *_ in candidates(PROBLEM, replace(H200, capability=(7, 5)))}
    record = {64: few_rows_heuristic(PROBLEM)}
    assert select(PROBLEM, H200, record).kernel == "few_rows"
    assert select(PROBLEM, H200, record, small_m_threshold=0).kernel == "few_rows"
    assert select(PROBLEM, H200, record, small_m_threshold=64).kernel == "direct"
    assert select(replace(PROBLEM, num_tokens=2048), H200, record).kernel == "grouped"


@pytest.mark.parametrize(
    ("num_tokens", "kernel"), [(8, "direct"), (9, "few_rows"), (64, "few_rows"), (65, "grouped")]
)
def test_without_a_record_chosen_where_they_were_measured(num_tokens, kernel):
    task = replace(PROBLEM, num_tokens=num_tokens)
    assert select(task, H200).kernel == kernel
    assert select(task, H200, small_m_threshold=0).kernel == ("grouped" if num_tokens > 64 else "few_rows")
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert select(task, replace(H200, capability=capability)).kernel != "few_rows"


@pytest.mark.parametrize("num_tokens", [4, 5, 8])
def test_fewer_tokens_stay_direct(num_tokens):
    task = replace(PROBLEM, num_tokens=num_tokens)
    assert select(task, H200, Records().lookup(task, H200)).kernel == "direct"


@pytest.mark.parametrize("num_tokens", [9, 16, 32, 64])
def test_shipped_with_a_record_for_an_h200(num_tokens):
    task = replace(PROBLEM, num_tokens=num_tokens)
    choice = select(task, H200, Records().lookup(task, H200))
    assert choice.kernel == "few_rows"
    assert (choice.gate_up, choice.down) == (few_rows_heuristic(task).gate_up, few_rows_heuristic(task).down)


def test_launches_refuse_other_groups():
    task = replace(PROBLEM, group_size=64)
    slab = empty_slab(replace(task, num_slots=1), True, torch.device("cpu"))
    rows_RD = torch.empty(512, 2048, dtype=torch.bfloat16)
    buffers = Workspace(rows_RD.device).claim(task)
    with pytest.raises(AssertionError, match="one group of scales"):
        launch_few_rows.down(rows_RD, slab, task, few_rows_heuristic(task), 512, buffers)


def test_candidates_are_made_of_whole_pairs():
    for num_tokens in (16, 256):
        task = replace(PROBLEM, num_tokens=num_tokens)
        found = [found for found in candidates(task, H200) if found[0] == "few_rows"]
        assert found
        for _, block_m, ups, downs in found:
            assert block_m <= FEW_ROWS_LARGEST_BLOCK_M
            for gemm, tiles in (("gate_up", ups), ("down", downs)):
                around = [n for t in tiles[:3] for n in neighbours(task, H200, "few_rows", block_m, gemm, t)]
                assert around
                for one in (*tiles, *around):
                    assert one.block_n % (FEW_ROWS_PAIR[gemm] * one.num_warps) == 0
                    assert one.preload <= 4


@pytest.mark.parametrize("num_tokens", [1, 16, 100, 512])
def test_buffers_hold_blocks_of_eight_rows(num_tokens):
    task = replace(PROBLEM, num_tokens=num_tokens)
    specs = buffer_specs(task, 1 << (num_tokens - 1).bit_length())
    blocks = max_blocks(num_tokens * task.top_k, task.num_slots, 8)
    assert blocks <= specs["block_slots"][0][0]
    assert blocks * 8 <= specs["sorted_R"][0][0]
    assert num_tokens * 2048 * 2 <= specs["x_ready_TD"][0][0]
