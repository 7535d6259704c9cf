"""Host side of the decode kernels; see `launch` for the others."""

from __future__ import annotations

import torch
import triton

from minisgl.moe.base import Placement, Problem
from minisgl.moe.kernels.direct import direct_down_kernel, direct_gate_up_kernel
from minisgl.moe.kernels.launch import (
    format_constants,
    pdl_options,
    plain_format_constants,
    tile_constants,
    weight_args,
)
from minisgl.moe.kernels.launch_words import uses_words, words_down, words_gate_up
from minisgl.moe.kernels.wide import wide_down_kernel, wide_gate_up_kernel
from minisgl.moe.select import PACKED_FORMATS, Choice, Tiles
from minisgl.moe.workspace import Buffers, next_power_of_two


def awaits_records(x_TD: torch.Tensor, problem: Problem, choice: Choice) -> bool:
    """Whether the kernels of a choice wait themselves for records that are on their way: those that read words do, unless x
    must be copied first, since what waits has to be launched directly behind the fetch.
    """
    both = (choice.gate_up, choice.down)
    direct = choice.kernel == "direct" and all(uses_words(problem, tiles, x_TD.device) for tiles in both)
    return direct and x_TD.data_ptr() % 16 == 0


def direct_gate_up(
    x_TD: torch.Tensor,
    placement: Placement,
    problem: Problem,
    choice: Choice,
    first_wave: bool,
    buffers: Buffers,
) -> None:
    tiles = choice.gate_up
    if uses_words(problem, tiles, x_TD.device):
        words_gate_up(x_TD, placement, problem, choice, first_wave, buffers)
        return
    assert tiles.wide or problem.format not in PACKED_FORMATS, (
        "4-bit codes are read as words, or on the tensor cores"
    )
    slab, shape = placement.slab, problem.shape
    args = weight_args(slab, "gate_up", tiles, words=tiles.wide)
    num_routes = placement.slots_TK.numel()
    grid = (num_routes * triton.cdiv(shape.hidden_dim, tiles.block_n),)
    outputs = (buffers.activated_PF, placement.slots_TK, buffers.served_R, num_routes)
    constants = {
        "D": shape.model_dim,
        "F": shape.hidden_dim,
        "TOP_K": problem.top_k,
        "ACTIVATION": problem.activation,
        "FIRST_WAVE": first_wave,
    }
    if tiles.wide:
        wide_gate_up_kernel[grid](
            x_TD,
            args.weights,
            args.scales,
            args.zeros,
            args.bias,
            *outputs,
            *args.strides,
            **constants,
            **format_constants(slab, "gate_up", shape.model_dim),
            **tile_constants(tiles, problem.dtype, x_TD.device),
        )
        return
    direct_gate_up_kernel[grid](
        x_TD,
        *args.plain_tensors,
        *outputs,
        *args.plain_strides,
        **constants,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PRELOAD=min(tiles.preload, triton.cdiv(shape.model_dim, tiles.block_k)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **plain_format_constants(slab, "gate_up"),
        **pdl_options(x_TD.device),
    )


def wide_down(
    rows_RD: torch.Tensor, placement: Placement, problem: Problem, tiles: Tiles, buffers: Buffers
) -> None:
    """Float32 rows of all routes."""
    slab, shape = placement.slab, problem.shape
    args = weight_args(slab, "down", tiles)
    num_routes = placement.slots_TK.numel()
    wide_down_kernel[(num_routes * triton.cdiv(shape.model_dim, tiles.block_n),)](
        buffers.activated_PF,
        args.weights,
        args.scales,
        args.zeros,
        args.bias,
        rows_RD,
        placement.slots_TK,
        num_routes,
        *args.strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        **format_constants(slab, "down", shape.hidden_dim),
        **tile_constants(tiles, problem.dtype, rows_RD.device),
    )


def direct_down(
    out: torch.Tensor, placement: Placement, weights_TK: torch.Tensor, problem: Problem, choice: Choice,
    buffers: Buffers, add_up: bool,
) -> None:  # fmt: skip
    """out: y [T, D] if add_up, else float32 rows [R, D]."""
    # The kernels ask for weights before their wait, so with weights that are just arriving they mustn't start early.
    early = {"PDL": False} if placement.in_two_parts else pdl_options(out.device)
    tiles = choice.down
    if uses_words(problem, tiles, out.device):
        words_down(out, placement, weights_TK, problem, choice, buffers, add_up, early)
        return
    slab, shape = placement.slab, problem.shape
    args = weight_args(slab, "down", tiles, words=False)
    num_n = triton.cdiv(shape.model_dim, tiles.block_n)
    direct_down_kernel[(problem.num_tokens * num_n,)](
        buffers.activated_PF,
        *args.plain_tensors,
        out,
        placement.slots_TK,
        weights_TK,
        num_n,
        *args.plain_strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        CHOICES=next_power_of_two(problem.top_k),
        SUM=add_up,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PRELOAD=min(tiles.preload, triton.cdiv(shape.hidden_dim, tiles.block_k)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **plain_format_constants(slab, "down"),
        **early,
    )
