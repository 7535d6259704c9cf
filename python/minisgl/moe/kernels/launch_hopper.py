"""Host side of `kernels.hopper`: descriptors, grids and constants of grouped GEMMs whose warps have roles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from minisgl.moe.base import Problem, Slab
from minisgl.moe.select import Choice, Tiles, has_gluon
from minisgl.moe.workspace import FP8_FORMATS, Buffers, max_blocks

if has_gluon():
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from minisgl.moe.kernels.hopper import down_hopper_kernel, gate_up_hopper_kernel

# As the kernels have them: rows of a tile, of a consumer's share, and of weights.
BLOCK_M, ROWS, BLOCK_N = 128, 64, 256
REGISTERS = 168  # a thread of 384, before warps give and take
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@lru_cache
def num_programs(device: torch.device) -> int:
    """One a multiprocessor, since its buffers fill the shared memory; 1 where kernels are only compiled."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], tile: list[int]) -> Any:
    """Of tiles as the tensor cores read swizzled rows: their last dimension is at most 128 bytes. strides: all but the last,
    which is 1."""
    layout = NVMMASharedLayout(tile[-1] * tensor.itemsize, 8 * tensor.itemsize, len(tile))
    return TensorDescriptor(tensor, shape, [*strides, 1], tile, layout)


def _constants(problem: Problem, tiles: Tiles, pdl: dict[str, bool]) -> dict[str, object]:
    return {
        "D": problem.shape.model_dim,
        "F": problem.shape.hidden_dim,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "STAGES": tiles.num_stages,
        "SCALED": problem.format in FP8_FORMATS,
        "PRODUCER_REGS": PRODUCER_REGISTERS,
        "CONSUMER_REGS": CONSUMER_REGISTERS,
        "num_warps": tiles.num_warps,
        "maxnreg": REGISTERS,
        **pdl,
    }


def _check_numbers(problem: Problem, num_routes: int) -> None:
    """A tile's number travels to the consumers in 31 bits: 18 of the row block, 12 of the column block."""
    assert max_blocks(num_routes, problem.num_slots, BLOCK_M) < 1 << 18, "too many routes for kernels.hopper"
    assert max(2 * problem.shape.hidden_dim, problem.shape.model_dim) < BLOCK_N << 12


def gate_up(
    x_TD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers,
    pdl: dict[str, bool],
) -> None:  # fmt: skip
    """x_TD: rows made ready, fp8 codes for fp8. pdl: `launch.pdl_options`."""
    tiles = choice.gate_up
    weights, scales = slab.parts["gate_up"], slab.parts.get("gate_up_scale")
    num_slots, rows, model_dim = weights.shape
    half = rows // 2
    _check_numbers(problem, num_routes)
    gate_up_hopper_kernel[(num_programs(x_TD.device),)](
        x_TD,
        buffers.x_scale_T if scales is not None else x_TD,
        descriptor(
            weights,
            [num_slots, 2, half, model_dim],
            [weights.stride(0), half * model_dim, model_dim],
            [1, 2, BLOCK_N // 2, tiles.block_k],
        ),
        x_TD if scales is None else scales,
        buffers.activated_PF,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        buffers.tile_counters,
        num_routes,
        0 if scales is None else scales.stride(0),
        TOP_K=problem.top_k,
        **_constants(problem, tiles, pdl),
    )


def down(
    rows_RD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers,
    pdl: dict[str, bool],
) -> None:  # fmt: skip
    tiles = choice.down
    weights, scales = slab.parts["down"], slab.parts.get("down_scale")
    num_slots, model_dim, hidden_dim = weights.shape
    activated = buffers.activated_PF if scales is None else buffers.activated_codes_PF
    _check_numbers(problem, num_routes)
    down_hopper_kernel[(num_programs(rows_RD.device),)](
        descriptor(activated, list(activated.shape), [hidden_dim], [ROWS, tiles.block_k]),
        rows_RD if scales is None else buffers.activated_scale_P,
        descriptor(
            weights,
            [num_slots, model_dim, hidden_dim],
            [weights.stride(0), hidden_dim],
            [1, BLOCK_N, tiles.block_k],
        ),
        rows_RD if scales is None else scales,
        rows_RD,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        buffers.tile_counters[1:],
        num_routes,
        0 if scales is None else scales.stride(0),
        **_constants(problem, tiles, pdl),
    )
