"""Host side of the kernels: from tensors and a choice to grids, strides and compile-time constants. Nothing decides here.

Every function enqueues exactly one kernel and never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.moe.base import Placement, Problem, Routing, RoutingRule, Slab
from minisgl.moe.kernels.align import align_kernel
from minisgl.moe.kernels.direct import direct_down_kernel, direct_gate_up_kernel
from minisgl.moe.kernels.grouped import down_kernel, gate_up_kernel
from minisgl.moe.kernels.quantize import quantize_rows_kernel
from minisgl.moe.kernels.reduce import reduce_kernel
from minisgl.moe.kernels.router import router_kernel
from minisgl.moe.select import PACKED_FORMATS, Choice, Tiles
from minisgl.moe.workspace import FP8_FORMATS, Buffers, max_blocks, next_power_of_two

RANK_MAX_TOKENS = 64  # up to here the router's latency counts, above its work
RANK_MAX_EXPERTS = 256


def on_cuda(device: torch.device) -> bool:
    """Whether kernels are compiled (not interpreted), so that they may hold PTX."""
    return device.type == "cuda"


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _pdl(device: torch.device) -> dict[str, bool]:
    """Keyword arguments that switch programmatic dependent launch, for kernel and driver alike."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}


@dataclass(frozen=True)
class WeightArgs:
    """One GEMM's weights as its kernel takes them; parts that don't exist are stood in for by the weights."""

    weights: torch.Tensor | TensorDescriptor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor
    stride_s: int
    stride_scale_s: int
    stride_scale_n: int
    stride_zero_s: int
    stride_bias_s: int

    @property
    def strides(self) -> tuple[int, ...]:
        return (
            self.stride_s,
            self.stride_scale_s,
            self.stride_scale_n,
            self.stride_zero_s,
            self.stride_bias_s,
        )


def _weight_args(slab: Slab, name: str, tiles: Tiles | None) -> WeightArgs:
    """tiles: of the grouped kernel; None for the direct ones, which read 4-bit weights as 32-bit words."""
    weights, parts = slab.parts[name], slab.parts
    scales, zeros, bias = (parts.get(f"{name}_{part}") for part in ("scale", "zero", "bias"))
    if tiles is None and slab.format in PACKED_FORMATS:
        weights = weights.view(torch.int32)
    operand = weights
    if tiles is not None and tiles.tma:
        step = tiles.block_k // 2 if slab.format in PACKED_FORMATS else tiles.block_k
        operand = TensorDescriptor(
            weights, list(weights.shape), list(weights.stride()), [1, tiles.block_n, step]
        )
    return WeightArgs(
        weights=operand,
        scales=weights if scales is None else scales,
        zeros=weights if zeros is None else zeros,
        bias=weights if bias is None else bias,
        stride_s=weights.stride(0),
        stride_scale_s=0 if scales is None else scales.stride(0),
        stride_scale_n=0 if scales is None or scales.ndim < 3 else scales.stride(1),
        stride_zero_s=0 if zeros is None else zeros.stride(0),
        stride_bias_s=0 if bias is None else bias.stride(0),
    )


def _format_constants(slab: Slab, name: str, hidden_cols: int) -> dict[str, object]:
    """What the kernels must know of the format at compile time; the group is read off the scales' shape."""
    group = 0
    if slab.format in PACKED_FORMATS:
        group = hidden_cols // slab.parts[f"{name}_scale"].shape[-1]
    return {
        "FORMAT": slab.format if slab.format in (*PACKED_FORMATS, *FP8_FORMATS, "int8") else "native",
        "GROUP": group,
        "HAS_ZERO": f"{name}_zero" in slab.parts,
        "HAS_BIAS": f"{name}_bias" in slab.parts,
    }


def _grouped_constants(tiles: Tiles, block_m: int, dtype: torch.dtype, device: torch.device) -> dict:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "SWAP": tiles.swap,
        "TMA": tiles.tma,
        "ASM": dtype == torch.bfloat16 and on_cuda(device),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **_pdl(device),
    }


def route(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None, num_valid: torch.Tensor | None
) -> Routing:
    num_tokens, num_experts = logits_TE.shape
    ids_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits_TE.device)
    if num_tokens == 0:  # a grid of zero leaves a sticky error
        return Routing(ids_TK, weights_TK)
    rank = num_tokens <= RANK_MAX_TOKENS and num_experts <= RANK_MAX_EXPERTS
    router_kernel[(num_tokens,)](
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        ids_TK if num_valid is None else num_valid,
        ids_TK,
        weights_TK,
        logits_TE.stride(0),
        rule.scaling_factor,
        E=num_experts,
        K=rule.top_k,
        EXPERTS=next_power_of_two(num_experts),
        CHOICES=next_power_of_two(rule.top_k),
        SCORING=rule.scoring,
        RENORMALIZE=rule.renormalize,
        HAS_BIAS=bias_E is not None,
        HAS_NUM_VALID=num_valid is not None,
        RANK=rank,
        num_warps=4 if rank else 1,
        **_pdl(logits_TE.device),
    )
    return Routing(ids_TK, weights_TK)


def align(slots_R: torch.Tensor, num_slots: int, block_m: int, first_wave: bool, buffers: Buffers) -> None:
    num_routes = slots_R.numel()
    chunk = min(next_power_of_two(max(num_routes, 32)), 2048)
    align_kernel[(num_slots,)](
        slots_R,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        buffers.served_R,
        num_routes,
        num_slots,
        FIRST_WAVE=first_wave,
        BLOCK_M=block_m,
        BINS=max(next_power_of_two(num_slots + 1), 32),
        CHUNK=chunk,
        num_warps=4 if chunk <= 512 else 8,
        **_pdl(slots_R.device),
    )


def quantize_rows(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, num_rows: int, buffers: Buffers, block_m: int
) -> None:
    """block_m: 0 if all num_rows rows exist, else only those of the first num_blocks blocks do."""
    width = x.shape[1]
    quantize_rows_kernel[(num_rows,)](
        x,
        codes,
        scale,
        buffers.num_blocks,
        N=width,
        BLOCK_N=next_power_of_two(width),
        BLOCK_M=block_m,
        num_warps=4 if width <= 4096 else 8,
        **_pdl(x.device),
    )


def quantize_activated(slab: Slab, problem: Problem, choice: Choice, buffers: Buffers) -> None:
    """fp8 codes of the activated rows, padding included, for the grouped down kernel."""
    num_routes = problem.num_tokens * problem.top_k
    positions = max_blocks(num_routes, slab.num_slots, choice.block_m) * choice.block_m
    codes, scale = buffers.activated_codes_PF, buffers.activated_scale_P
    quantize_rows(buffers.activated_PF, codes, scale, positions, buffers, choice.block_m)


def gate_up(
    x_TD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers
) -> None:
    tiles, shape = choice.gate_up, problem.shape
    args = _weight_args(slab, "gate_up", tiles)
    grid_m = max_blocks(num_routes, slab.num_slots, choice.block_m)
    codes = problem.format in FP8_FORMATS
    gate_up_kernel[(grid_m * triton.cdiv(shape.hidden_dim, tiles.block_n),)](
        buffers.x_codes_TD if codes else x_TD,
        buffers.x_scale_T if codes else x_TD,
        args.weights,
        args.scales,
        args.zeros,
        args.bias,
        buffers.activated_PF,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        num_routes,
        grid_m,
        *args.strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        ACTIVATION=problem.activation,
        **_format_constants(slab, "gate_up", shape.model_dim),
        **_grouped_constants(tiles, choice.block_m, problem.dtype, x_TD.device),
    )


def down(
    rows_RD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers
) -> None:
    tiles, shape = choice.down, problem.shape
    args = _weight_args(slab, "down", tiles)
    grid_m = max_blocks(num_routes, slab.num_slots, choice.block_m)
    codes = problem.format in FP8_FORMATS
    down_kernel[(grid_m * triton.cdiv(shape.model_dim, tiles.block_n),)](
        buffers.activated_codes_PF if codes else buffers.activated_PF,
        buffers.activated_scale_P if codes else rows_RD,
        args.weights,
        args.scales,
        args.zeros,
        args.bias,
        rows_RD,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        num_routes,
        grid_m,
        *args.strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        **_format_constants(slab, "down", shape.hidden_dim),
        **_grouped_constants(tiles, choice.block_m, problem.dtype, rows_RD.device),
    )


def direct_gate_up(
    x_TD: torch.Tensor,
    placement: Placement,
    problem: Problem,
    tiles: Tiles,
    first_wave: bool,
    buffers: Buffers,
) -> None:
    slab, shape = placement.slab, problem.shape
    args = _weight_args(slab, "gate_up", None)
    num_routes = placement.slots_TK.numel()
    direct_gate_up_kernel[(num_routes * triton.cdiv(shape.hidden_dim, tiles.block_n),)](
        x_TD,
        args.weights,
        args.scales,
        args.zeros,
        args.bias,
        buffers.activated_PF,
        placement.slots_TK,
        buffers.served_R,
        num_routes,
        *args.strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        ACTIVATION=problem.activation,
        FIRST_WAVE=first_wave,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **_format_constants(slab, "gate_up", shape.model_dim),
        **_pdl(x_TD.device),
    )


def direct_down(
    out: torch.Tensor, placement: Placement, weights_TK: torch.Tensor, problem: Problem, tiles: Tiles,
    buffers: Buffers, add_up: bool,
) -> None:  # fmt: skip
    """out: y [T, D] if add_up, else float32 rows [R, D]."""
    slab, shape = placement.slab, problem.shape
    args = _weight_args(slab, "down", None)
    num_n = triton.cdiv(shape.model_dim, tiles.block_n)
    direct_down_kernel[(problem.num_tokens * num_n,)](
        buffers.activated_PF,
        args.weights,
        args.scales,
        args.zeros,
        args.bias,
        out,
        placement.slots_TK,
        weights_TK,
        num_n,
        *args.strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        TOP_K=problem.top_k,
        CHOICES=next_power_of_two(problem.top_k),
        SUM=add_up,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **_format_constants(slab, "down", shape.hidden_dim),
        **_pdl(out.device),
    )


def reduce(rows_RD: torch.Tensor, weights_TK: torch.Tensor, buffers: Buffers, y_TD: torch.Tensor) -> None:
    num_tokens, model_dim = y_TD.shape
    block_d = min(next_power_of_two(model_dim), 512 if num_tokens <= 256 else 2048)
    reduce_kernel[(num_tokens, triton.cdiv(model_dim, block_d))](
        rows_RD,
        weights_TK,
        buffers.served_R,
        y_TD,
        D=model_dim,
        K=weights_TK.shape[1],
        BLOCK_D=block_d,
        num_warps=2 if block_d <= 512 else 8,
        **_pdl(y_TD.device),
    )
