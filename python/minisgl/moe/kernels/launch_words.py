"""Host side of the decode kernels on 32-bit words; see `launch` for the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton

from minisgl.moe.base import Placement, Problem, Slab
from minisgl.moe.kernels import launch
from minisgl.moe.kernels.direct_words import words_down_kernel, words_gate_up_kernel
from minisgl.moe.kernels.launch import pdl_options, weight_args
from minisgl.moe.select import CODES_PER_WORD, PACKED_FORMATS, Choice, Tiles, reads_words
from minisgl.moe.workspace import Buffers, next_power_of_two


def uses_words(problem: Problem, tiles: Tiles, device: torch.device) -> bool:
    """Whether the direct kernels read this problem as words; in the interpreter in any dtype."""
    if tiles.wide:
        return False
    if not launch.on_cuda(device):
        problem = replace(problem, dtype=torch.bfloat16)
    return reads_words(problem)


def in_lane_order(problem: Problem, choice: Choice, device: torch.device) -> bool:
    """Whether gate_up stores activated rows as the lanes of down read them: see `word_loads.lane_order`."""
    both = (choice.gate_up, choice.down)
    words = problem.format in PACKED_FORMATS and all(uses_words(problem, tiles, device) for tiles in both)
    return words and problem.shape.hidden_dim % 256 == 0


def _group(slab: Slab, name: str, num_cols: int) -> int:
    """Columns that share a scale; 0: all of a row."""
    if slab.format == "fp8_block":
        return 128
    return num_cols // slab.parts[f"{name}_scale"].shape[-1] if slab.format in PACKED_FORMATS else 0


def word_args(slab: Slab, name: str, tiles: Tiles) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """(32-bit words, scales, zeros and bias; their strides) of one GEMM's weights."""
    args = weight_args(slab, name, tiles, words=False)
    words = slab.parts[name].view(torch.int32)
    return (words, args.scales, args.zeros, args.bias), (words.stride(0), *args.strides[1:])


def _constants(
    slab: Slab, name: str, num_cols: int, x: torch.Tensor, num_rows: int, tiles: Tiles
) -> dict[str, Any]:
    """num_rows: rows of x that a program meets.

    FOURS: a thread holds four neighbouring words (and their x) at a time, which faster arithmetic counts on. Triton
    does so where 16 bytes are left for every thread and rows start on 16 bytes.
    """
    group = _group(slab, name, num_cols)
    asm = x.dtype == torch.bfloat16 and launch.on_cuda(x.device)  # replaced where one only compiles
    words = tiles.block_k // CODES_PER_WORD[slab.format]
    fours = num_rows * words >= 128 * tiles.num_warps
    fours = fours and (group % 128 == 0 if slab.format == "int4" else num_cols % 16 == 0)
    assert group == 0 or tiles.block_k % group == 0, "a step must be made of whole groups"
    return {
        "FORMAT": slab.format,
        "HAS_BIAS": f"{name}_bias" in slab.parts,
        "GROUP": group,
        "HAS_ZERO": f"{name}_zero" in slab.parts,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "PRELOAD": min(tiles.preload, triton.cdiv(num_cols, tiles.block_k)),
        "FOURS": asm and fours,
        "ASM": asm,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "maxnreg": tiles.registers or None,
    }


def words_gate_up(
    x_TD: torch.Tensor,
    placement: Placement,
    problem: Problem,
    choice: Choice,
    first_wave: bool,
    buffers: Buffers,
) -> None:
    slab, shape, tiles = placement.slab, problem.shape, choice.gate_up
    if x_TD.data_ptr() % 16:  # a view that begins in the middle of a word; loads are up to 16 bytes wide
        x_TD = x_TD.clone()
    tensors, strides = word_args(slab, "gate_up", tiles)
    num_routes, arrival = placement.slots_TK.numel(), placement.arrival
    words_gate_up_kernel[(num_routes, triton.cdiv(shape.hidden_dim, tiles.block_n))](
        x_TD,
        *tensors,
        buffers.activated_PF,
        placement.slots_TK if arrival is None else arrival.told_3M,
        placement.slots_TK if arrival is None else arrival.arrived_S1,
        buffers.served_R,
        *strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        ACTIVATION=problem.activation,
        FIRST_WAVE=first_wave,
        LANE_ORDER=in_lane_order(problem, choice, x_TD.device),
        CHUNKS=0 if arrival is None else arrival.chunks[0],
        **_constants(slab, "gate_up", shape.model_dim, x_TD, 1, tiles),
        **pdl_options(x_TD.device),
    )


def words_down(
    out: torch.Tensor, placement: Placement, weights_TK: torch.Tensor, problem: Problem, choice: Choice,
    buffers: Buffers, add_up: bool, early: dict[str, bool],
) -> None:  # fmt: skip
    """out: y [T, D] if add_up, else float32 rows [R, D]. early: options of a dependent launch."""
    slab, shape, tiles = placement.slab, problem.shape, choice.down
    tensors, strides = word_args(slab, "down", tiles)
    choices, arrival = next_power_of_two(problem.top_k), placement.arrival
    # What came last is asked for at once, where it takes three steps; more wouldn't fit into registers.
    if arrival is not None and 3 * tiles.block_k == shape.hidden_dim:
        tiles = replace(tiles, preload=3)
    words_down_kernel[(problem.num_tokens, triton.cdiv(shape.model_dim, tiles.block_n))](
        buffers.activated_PF,
        *tensors,
        out,
        placement.slots_TK if arrival is None else arrival.told_3M,
        placement.slots_TK if arrival is None else arrival.arrived_S1,
        weights_TK,
        *strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        LEVELS=choices.bit_length() - 1,
        SUM=add_up,
        LANE_ORDER=in_lane_order(problem, choice, out.device),
        CHUNKS=0 if arrival is None else arrival.chunks[1],
        PROGRAMS=0 if arrival is None else arrival.programs,
        **_constants(slab, "down", shape.hidden_dim, buffers.activated_PF, choices, tiles),
        **early,
    )
