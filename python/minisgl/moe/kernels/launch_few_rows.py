"""Host side of the kernels for few rows a slot, int4 groups of 128; takes the place of `launch.gate_up` and `launch.down`."""

from __future__ import annotations

from typing import Any

import torch
import triton

from minisgl.moe.base import Problem, Slab
from minisgl.moe.kernels import launch
from minisgl.moe.kernels.few_rows import few_rows_down_kernel, few_rows_gate_up_kernel
from minisgl.moe.kernels.launch import pdl_options
from minisgl.moe.kernels.launch_words import word_args
from minisgl.moe.select import FEW_ROWS_PAIR, Choice, Tiles
from minisgl.moe.workspace import FEW_ROWS_GROUP, Buffers, max_blocks


def _constants(slab: Slab, name: str, num_cols: int, x: torch.Tensor, choice: Choice) -> dict[str, Any]:
    """Up to a number of tiles at a time 128 registers are enough, which ptxas passes by one or two (but not in down with
    several warps, where it does with 96): that would cost the sixteenth warp."""
    tiles: Tiles = getattr(choice, name)
    rows = FEW_ROWS_PAIR[name] * tiles.num_warps
    pairs = tiles.block_n // rows
    crowded = name == "gate_up" or tiles.num_warps == 1
    limit = crowded and choice.block_m == 8 and pairs * (tiles.preload * tiles.num_stages + 1) <= 10
    groups = slab.parts[f"{name}_scale"].shape[-1]
    assert groups * FEW_ROWS_GROUP == num_cols, "a step is one group of scales"
    assert tiles.block_n % rows == 0, "a program must be made of whole pairs of tiles"
    assert tiles.preload <= 4, "scales are loaded for four steps"
    return {
        "HAS_ZERO": f"{name}_zero" in slab.parts,
        "HAS_BIAS": f"{name}_bias" in slab.parts,
        "BLOCK_M": choice.block_m,
        "PAIRS": pairs,
        "WARPS": tiles.num_warps,
        "CHUNK": min(tiles.preload, triton.cdiv(num_cols, 128)),
        "EARLY": tiles.num_stages > 1,
        "ASM": x.dtype == torch.bfloat16 and launch.on_cuda(x.device),
        "num_warps": tiles.num_warps,
        "maxnreg": 128 if limit else None,
    }


def gate_up(
    x_TD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers
) -> None:
    shape = problem.shape
    tensors, strides = word_args(slab, "gate_up", choice.gate_up)
    blocks = max_blocks(num_routes, problem.num_slots, choice.block_m)
    few_rows_gate_up_kernel[(blocks * triton.cdiv(shape.hidden_dim, choice.gate_up.block_n),)](
        buffers.x_ready(x_TD, problem.format),
        *tensors,
        buffers.activated_PF,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        num_routes,
        *strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        ACTIVATION=problem.activation,
        **_constants(slab, "gate_up", shape.model_dim, x_TD, choice),
        **pdl_options(x_TD.device),
    )


def down(
    rows_RD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers,
    arriving: bool = False,
) -> None:  # fmt: skip
    """arriving: whether weights may have come just now. The kernel asks for them before its wait, so it mustn't start early."""
    shape = problem.shape
    tensors, strides = word_args(slab, "down", choice.down)
    blocks = max_blocks(num_routes, problem.num_slots, choice.block_m)
    few_rows_down_kernel[(blocks * triton.cdiv(shape.model_dim, choice.down.block_n),)](
        buffers.activated_PF,
        *tensors,
        rows_RD,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        num_routes,
        *strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        **_constants(slab, "down", shape.hidden_dim, rows_RD, choice),
        **({"PDL": False} if arriving else pdl_options(rows_RD.device)),
    )
