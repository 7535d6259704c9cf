"""Host side of `kernels.hopper_words`: grouped GEMMs of int4 in groups of 128, and of mxfp4, whose warps have roles."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.moe.base import Problem, Slab
from minisgl.moe.kernels.launch_hopper import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    descriptor,
    num_programs,
)
from minisgl.moe.select import Choice, Tiles, has_gluon
from minisgl.moe.workspace import Buffers, max_blocks

if has_gluon():
    from minisgl.moe.kernels.hopper_words import down_words_kernel, gate_up_words_kernel

CODES = 4  # in a word of 16 bits
COLUMNS = 64  # of x in a tile of shared memory
FEW_ROWS = 32


def piece(block_m: int) -> int:
    """Rows by which the kernels count a block's. Fewer cost small blocks less padding and large ones more variants."""
    return min(block_m, 16 if block_m <= FEW_ROWS else 32)


def _constants(
    problem: Problem, slab: Slab, choice: Choice, name: str, pdl: dict[str, bool]
) -> dict[str, Any]:
    tiles: Tiles = getattr(choice, name)
    assert tiles.block_n == (128 if name == "gate_up" else 256), "a tile has 256 rows of weights"
    return {
        "D": problem.shape.model_dim,
        "F": problem.shape.hidden_dim,
        "HAS_ZERO": f"{name}_zero" in slab.parts,
        "HAS_BIAS": f"{name}_bias" in slab.parts,
        "BLOCK_M": choice.block_m,
        "PIECE": piece(choice.block_m),
        "BLOCK_K": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "STAGES": tiles.num_stages,
        "LATE": problem.format == "int4" and choice.block_m <= FEW_ROWS,
        "PRODUCER_REGS": PRODUCER_REGISTERS,
        "CONSUMER_REGS": CONSUMER_REGISTERS,
        "num_warps": tiles.num_warps,
        "maxnreg": REGISTERS,
        **pdl,
    }


def _params(slab: Slab, name: str) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Scales, zeros and biases (scales again where there are none), and their strides from slot to slot, zeros' in int32."""
    scales, zeros, bias = (slab.parts.get(f"{name}_{part}") for part in ("scale", "zero", "bias"))
    assert scales is not None
    if slab.format == "mxfp4":
        assert scales.stride(0) % 4 == 0 and scales.data_ptr() % 4 == 0, "scales are read four at a time"
        scales = scales.flatten(1).view(torch.uint32)
    if zeros is not None:
        assert zeros.stride(0) % 4 == 0 and zeros.data_ptr() % 4 == 0, "zeros are read four at a time"
        zeros = zeros.flatten(1).view(torch.int32)
    tensors = [scales if part is None else part for part in (scales, zeros, bias)]
    return tuple(tensors), tuple(part.stride(0) for part in tensors)


def _check(problem: Problem, choice: Choice, num_routes: int) -> None:
    """A tile's number travels to the consumers in 31 bits: 15 of the row block, 12 of the column block, 4 of pieces."""
    assert max_blocks(num_routes, problem.num_slots, choice.block_m) < 1 << 15, (
        "too many routes for kernels.hopper_words"
    )
    assert max(2 * problem.shape.hidden_dim, problem.shape.model_dim) < 128 << 12
    assert choice.block_m // piece(choice.block_m) < 16


def gate_up(
    x_TD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers, pdl: dict[str, bool]
) -> None:  # fmt: skip
    """x_TD: rows as they are. pdl: `launch.pdl_options`."""
    words, tiles = slab.parts["gate_up"].view(torch.int16), choice.gate_up
    num_slots, rows, width = words.shape
    _check(problem, choice, num_routes)
    params, strides = _params(slab, "gate_up")
    gate_up_words_kernel[(num_programs(x_TD.device),)](
        x_TD,
        descriptor(
            words,
            [num_slots, rows // 16, 2, 8, width],
            [words.stride(0), 8 * width, rows // 2 * width, width],
            [1, tiles.block_n // 8, 2, 8, tiles.block_k // CODES],
        ),
        *params,
        buffers.activated_PF,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        buffers.tile_counters,
        num_routes,
        *strides,
        TOP_K=problem.top_k,
        ACTIVATION=problem.activation,
        **_constants(problem, slab, choice, "gate_up", pdl),
    )


def down(
    rows_RD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers,
    pdl: dict[str, bool],
) -> None:  # fmt: skip
    words, tiles = slab.parts["down"].view(torch.int16), choice.down
    num_slots, model_dim, width = words.shape
    _check(problem, choice, num_routes)
    params, strides = _params(slab, "down")
    activated = buffers.activated_PF
    down_words_kernel[(num_programs(rows_RD.device),)](
        descriptor(activated, list(activated.shape), [activated.shape[1]], [piece(choice.block_m), COLUMNS]),
        descriptor(
            words,
            [num_slots, model_dim, width],
            [words.stride(0), width],
            [1, tiles.block_n, tiles.block_k // CODES],
        ),
        *params,
        rows_RD,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        buffers.tile_counters[1:],
        num_routes,
        *strides,
        **_constants(problem, slab, choice, "down", pdl),
    )
