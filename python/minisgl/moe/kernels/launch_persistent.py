"""Host side of `kernels.persistent`: both grouped GEMMs of a step in one launch, or one by one."""

from __future__ import annotations

from typing import Any, Literal

import torch

from minisgl.moe.base import Problem, Slab
from minisgl.moe.kernels.launch import pdl_options, row_mode
from minisgl.moe.kernels.launch_hopper import descriptor, num_programs
from minisgl.moe.select import PERSISTENT_ROW_BYTES, Choice, Tiles, has_gluon, persistent_programs
from minisgl.moe.workspace import Buffers, max_blocks

if has_gluon():
    from minisgl.moe.kernels.persistent import persistent_kernel

HALF = 64  # as the kernel has it: rows of weights of one instruction
Gemms = Literal["both", "gate_up", "down"]


def gate_up_and_down(
    rows_RD: torch.Tensor, x_TD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int,
    buffers: Buffers, gemms: Gemms = "both",
) -> None:  # fmt: skip
    """x_TD: rows as they are; those that `launch.align` made ready are in the buffers. gemms: "gate_up" and then "down" give
    the bits of "both"."""
    up, down = slab.parts["gate_up"], slab.parts["down"]
    up_scale, down_scale = slab.parts.get("gate_up_scale"), slab.parts.get("down_scale")
    consumers, programs = choice.gate_up.block_n // HALF, persistent_programs(problem, choice)
    _check(problem, choice, num_routes)
    fp8, ready = problem.format == "fp8", row_mode(problem.format) != "none"
    counter = buffers.tile_counters[1:] if gemms == "down" else buffers.tile_counters
    persistent_kernel[(num_programs(x_TD.device) * programs,)](
        buffers.x_ready(x_TD, problem.format) if ready else x_TD,
        buffers.x_scale_T if fp8 else x_TD,
        _weights_descriptor(up),
        x_TD if up_scale is None else up_scale,
        _weights_descriptor(down),
        x_TD if down_scale is None else down_scale,
        buffers.activated_PF,
        buffers.activated_codes_PF if fp8 else buffers.activated_PF,
        buffers.activated_scale_P if fp8 else x_TD,
        rows_RD,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        buffers.tiles_done_B,
        counter,
        num_routes,
        int(gemms != "down"),
        int(gemms != "gate_up"),
        0 if up_scale is None else up_scale.stride(0),
        0 if down_scale is None else down_scale.stride(0),
        D=problem.shape.model_dim,
        F=problem.shape.hidden_dim,
        TOP_K=problem.top_k,
        FORMAT=problem.format if problem.format in ("fp8", "int8") else "native",
        BLOCK_M=choice.block_m,
        NC=consumers,
        **_constants(choice.gate_up, consumers, programs, x_TD.device),
    )


def _weights_descriptor(weights: torch.Tensor) -> Any:
    """Slots of rows, in tiles of half a consumer's rows and a step of K, as the tensor cores read swizzled rows."""
    if weights.dtype == torch.int8:
        weights = weights.view(torch.int16)
    tile = [1, HALF, PERSISTENT_ROW_BYTES // weights.itemsize]
    return descriptor(weights, list(weights.shape), [weights.stride(0), weights.shape[2]], tile)


def _constants(tiles: Tiles, consumers: int, programs: int, device: torch.device) -> dict[str, object]:
    """Registers a thread: those of the launch, and what the kinds of warps exchange them for when they part."""
    registers = (80, 64) if programs == 2 else (112, 72) if consumers == 1 else (128, 56)
    return {
        "GROUP_M": tiles.group_m,
        "STAGES": tiles.num_stages,
        "maxnreg": registers[0],
        "CONSUMER_REGS": 208,
        "ROWS_REGS": registers[1],
        "WEIGHTS_REGS": 40,
        "num_warps": tiles.num_warps,
        **pdl_options(device),
    }


def _check(problem: Problem, choice: Choice, num_routes: int) -> None:
    """A tile's number is an int32; the two GEMMs share their tiles' shape."""
    up, down, shape = choice.gate_up, choice.down, problem.shape
    assert down.block_n == 2 * up.block_n, "a consumer has as many rows of down as of gate and up together"
    blocks = max_blocks(num_routes, problem.num_slots, choice.block_m)
    assert blocks * (shape.hidden_dim + shape.model_dim) // HALF < 1 << 31, "too many routes for one launch"
