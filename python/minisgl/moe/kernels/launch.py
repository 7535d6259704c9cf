"""Host side of the kernels: from tensors and a choice to grids, strides and compile-time constants. Nothing decides here.

Every function enqueues exactly one kernel and never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.moe.base import Problem, Routing, RoutingRule, Slab
from minisgl.moe.kernels import launch_hopper, launch_hopper_words, launch_router
from minisgl.moe.kernels.align import align_kernel, count_kernel, place_kernel
from minisgl.moe.kernels.grouped import down_kernel, gate_up_kernel
from minisgl.moe.kernels.reduce import reduce_kernel
from minisgl.moe.kernels.router import router_kernel
from minisgl.moe.kernels.rows import quantize_activated_kernel
from minisgl.moe.select import PACKED_FORMATS, Choice, Tiles
from minisgl.moe.workspace import (
    ALIGN_CHUNK,
    FP8_FORMATS,
    SUM_UNIT,
    Buffers,
    max_blocks,
    next_power_of_two,
    num_bins,
    num_chunks,
)

RANK_MAX_TOKENS = 64  # up to here the router's latency counts, above its work
RANK_MAX_EXPERTS = 256
SUM_MAX_BLOCK_M = 16
ONE_LAUNCH_ROUTES = 2048  # more are aligned by two launches, each with many programs
WEIGHTS_PER_WORD = {"int4": 4, "mxfp4": 4, "int8": 2}


def on_cuda(device: torch.device) -> bool:
    """Whether kernels are compiled (not interpreted), so that they may hold PTX."""
    return device.type == "cuda"


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
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

    @property
    def plain_tensors(self) -> tuple[torch.Tensor | TensorDescriptor, ...]:
        """Without zeros, which the kernels on the ordinary cores don't know."""
        return self.weights, self.scales, self.bias

    @property
    def plain_strides(self) -> tuple[int, ...]:
        return self.stride_s, self.stride_scale_s, self.stride_scale_n, self.stride_bias_s


def weight_args(slab: Slab, name: str, tiles: Tiles, words: bool = True) -> WeightArgs:
    """words: read int4, mxfp4 and int8 as 16-bit words (all kernels on the tensor cores do)."""
    weights, parts = slab.parts[name], slab.parts
    scales, zeros, bias = (parts.get(f"{name}_{part}") for part in ("scale", "zero", "bias"))
    per_word = WEIGHTS_PER_WORD.get(slab.format, 1) if words else 1
    if per_word > 1:
        weights = weights.view(torch.int16)
    return WeightArgs(
        weights=_descriptor(weights, name, tiles, per_word) if tiles.tma and words else weights,
        scales=weights if scales is None else scales,
        zeros=weights if zeros is None else zeros,
        bias=weights if bias is None else bias,
        stride_s=weights.stride(0),
        stride_scale_s=0 if scales is None else scales.stride(0),
        stride_scale_n=0 if scales is None or scales.ndim < 3 else scales.stride(1),
        stride_zero_s=0 if zeros is None else zeros.stride(0),
        stride_bias_s=0 if bias is None else bias.stride(0),
    )


def _descriptor(weights: torch.Tensor, name: str, tiles: Tiles, per_word: int) -> TensorDescriptor:
    """[S, N, halves, words]: gate and up rows are halves of gate_up, so that one tile holds the same rows of both."""
    num_slots, num_rows, num_words = weights.shape
    halves = 2 if name == "gate_up" else 1
    return TensorDescriptor(
        weights,
        [num_slots, num_rows // halves, halves, num_words],
        [weights.stride(0), num_words, num_rows // halves * num_words, 1],
        [1, tiles.block_n, halves, tiles.block_k // per_word],
    )


def format_constants(slab: Slab, name: str, num_cols: int) -> dict[str, object]:
    """What the kernels must know of the format at compile time; the group is read off the scales' shape."""
    packed = slab.format in PACKED_FORMATS
    return {
        **plain_format_constants(slab, name),
        "GROUP": num_cols // slab.parts[f"{name}_scale"].shape[-1] if packed else 0,
        "HAS_ZERO": f"{name}_zero" in slab.parts,
    }


def plain_format_constants(slab: Slab, name: str) -> dict[str, object]:
    known = slab.format in (*PACKED_FORMATS, *FP8_FORMATS, "int8")
    return {"FORMAT": slab.format if known else "native", "HAS_BIAS": f"{name}_bias" in slab.parts}


def tile_constants(tiles: Tiles, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    return {
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "TMA": tiles.tma,
        "ASM": dtype == torch.bfloat16 and on_cuda(device),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **pdl_options(device),
    }


def _grouped_constants(tiles: Tiles, block_m: int) -> dict[str, object]:
    # Half a block must still fill the tensor cores' 64 rows, unless the rows are the short side of a swapped product.
    tail = block_m >= 128 or (tiles.swap and block_m >= 64)
    return {
        "BLOCK_M": block_m,
        "GROUP_M": tiles.group_m,
        "SWAP": tiles.swap,
        "TAIL": tail,
        "TILES_N": tiles.tiles_n,
    }


def route(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None, num_valid: torch.Tensor | None
) -> Routing:
    num_tokens, num_experts = logits_TE.shape
    ids_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits_TE.device)
    if num_tokens == 0:  # a grid of zero leaves a sticky error
        return Routing(ids_TK, weights_TK)
    if has_dependent_launch(logits_TE.device) and launch_router.fits(logits_TE, rule, bias_E):
        out, early = Routing(ids_TK, weights_TK), pdl_options(logits_TE.device)
        return launch_router.route(logits_TE, rule, num_valid, out, early)
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
        **pdl_options(logits_TE.device),
    )
    return Routing(ids_TK, weights_TK)


@dataclass(frozen=True)
class SumUnits:
    """Columns that a sum of x, and one of activated rows, covers, for products with int4 codes as they are; 0: no sums.
    in_order: the kernels of `few_rows` make sums of their own, but want the columns in another order."""

    x: int = 0
    activated: int = 0
    in_order: bool = False


def sum_units(problem: Problem, choice: Choice) -> SumUnits:
    """Sums pay where blocks are small: there scales are applied to products, and so can zeros be (see `product`). With 32 rows
    a block they cost more registers than they save instructions: gate_up at 256 tokens on an H200 129 us against 102."""
    group, shape = problem.group_size or 128, problem.shape
    if choice.kernel == "few_rows":
        return SumUnits(in_order=True)
    if problem.format != "int4" or choice.kernel != "grouped" or choice.block_m > SUM_MAX_BLOCK_M:
        return SumUnits()
    if choice.gate_up.roles:  # they subtract from weights
        return SumUnits()
    up_k, down_k = choice.gate_up.block_k, choice.down.block_k
    exact = down_k <= group and shape.hidden_dim % down_k == 0 and not choice.down.roles
    units = SumUnits(
        x=up_k if up_k <= group and shape.model_dim % up_k == 0 else 0,
        activated=min(choice.gate_up.block_n, 64) if exact else 0,
    )
    assert all(unit == 0 or unit >= SUM_UNIT for unit in (units.x, units.activated))
    return units


def row_mode(format_name: str) -> str:
    """How rows of x are made ready for the grouped kernels (see kernels.rows)."""
    if format_name in FP8_FORMATS:
        return "fp8"
    return "split" if format_name == "int8" else "none"


def align(
    x_TD: torch.Tensor, slots_TK: torch.Tensor, num_slots: int, problem: Problem, block_m: int, first_wave: bool,
    buffers: Buffers, units: SumUnits = SumUnits(),
) -> None:  # fmt: skip
    """Sort the routes by slot and, in the first wave, make the rows of x ready; one launch, or two for many routes."""
    num_routes = slots_TK.numel()
    mode = row_mode(problem.format) if first_wave and not interpreted_fp8(problem, x_TD) else "none"
    if first_wave and units.in_order:
        mode = "order"
    x_ready = x_TD if mode == "none" else buffers.x_ready(x_TD, problem.format)
    if first_wave and units.x:
        mode = "sums"
    rows = 0 if mode == "none" else len(x_TD)
    x_scale = buffers.x_sums if mode == "sums" else buffers.x_scale_T
    constants = {
        "D": x_TD.shape[1],
        "BLOCK_D": next_power_of_two(x_TD.shape[1]),
        "ROW_MODE": mode,
        "UNIT": units.x if mode == "sums" else 1,
        "FIRST_WAVE": first_wave,
        "BINS": num_bins(num_slots),
        "num_warps": 4,
        **pdl_options(x_TD.device),
    }
    amax = codes_in_down(problem, block_m, x_TD)
    if num_routes <= ONE_LAUNCH_ROUTES:
        chunk = next_power_of_two(max(num_routes, 32))
        constants["num_warps"] = 4 if chunk <= 512 else 8
        align_kernel[(num_slots + 1 + rows,)](
            slots_TK, buffers.sorted_R, buffers.block_slots, buffers.num_blocks, buffers.tiles_done_B,
            buffers.served_R, num_routes, num_slots, x_TD, x_ready, x_scale, buffers.activated_scale_P, AMAX=amax,
            BLOCK_M=block_m, CHUNK=chunk, **constants,
        )  # fmt: skip
        return
    chunks, constants["num_warps"] = num_chunks(num_routes), 8
    assert chunks * num_bins(num_slots) <= buffers.counts_CB.numel(), "counts_CB is too small for this slab"
    count_kernel[(chunks + rows,)](
        slots_TK, buffers.counts_CB, buffers.rank_R, buffers.served_R, num_routes, chunks, x_TD, x_ready, x_scale,
        CHUNK=ALIGN_CHUNK, **constants,
    )  # fmt: skip
    place_kernel[(chunks + num_slots,)](
        slots_TK, buffers.counts_CB, buffers.rank_R, buffers.sorted_R, buffers.block_slots, buffers.num_blocks,
        buffers.tiles_done_B, buffers.activated_scale_P, num_routes, num_slots, chunks, AMAX=amax, BLOCK_M=block_m,
        BINS=num_bins(num_slots), CHUNK=ALIGN_CHUNK, CHUNKS=min(next_power_of_two(chunks), 128), num_warps=8,
        **pdl_options(x_TD.device),
    )  # fmt: skip


def codes_in_down(problem: Problem, block_m: int, x: torch.Tensor) -> bool:
    """fp8 with few rows a block: down makes the codes of its rows itself, given their maxima; a launch less."""
    return problem.format in FP8_FORMATS and block_m <= 32 and on_cuda(x.device)


def interpreted_fp8(problem: Problem, x_TD: torch.Tensor) -> bool:
    """The interpreter's conversion to fp8 loses a carry: there the definition makes the codes, see `fused`."""
    return problem.format in FP8_FORMATS and not on_cuda(x_TD.device)


def quantize_activated(problem: Problem, block_m: int, num_routes: int, buffers: Buffers) -> None:
    """fp8 codes of the activated rows, padding included, for the grouped down kernel."""
    positions = max_blocks(num_routes, problem.num_slots, block_m) * block_m
    width, rows = problem.shape.hidden_dim, 4
    quantize_activated_kernel[(positions // rows,)](
        buffers.activated_PF,
        buffers.activated_codes_PF,
        buffers.activated_scale_P,
        buffers.num_blocks,
        N=width,
        BLOCK_N=next_power_of_two(width),
        BLOCK_M=block_m,
        ROWS=rows,
        num_warps=4,
        **pdl_options(buffers.activated_PF.device),
    )


def gate_up(
    x_TD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers
) -> None:
    """x_TD: rows as they are; those made ready by `align` are taken from the buffers where the format wants them."""
    tiles, shape = choice.gate_up, problem.shape
    mode, units = row_mode(problem.format), sum_units(problem, choice)
    x_ready_TD = x_TD if mode == "none" else buffers.x_ready(x_TD, problem.format)
    if tiles.roles:
        with_roles = launch_hopper_words if problem.format in PACKED_FORMATS else launch_hopper
        with_roles.gate_up(x_ready_TD, slab, problem, choice, num_routes, buffers, pdl_options(x_TD.device))
        return
    args = weight_args(slab, "gate_up", tiles)
    grid_m = max_blocks(num_routes, problem.num_slots, choice.block_m)
    gate_up_kernel[(grid_m * triton.cdiv(shape.hidden_dim, tiles.block_n * tiles.tiles_n),)](
        x_ready_TD,
        buffers.x_sums if units.x else buffers.x_scale_T if mode == "fp8" else x_TD,
        args.weights,
        args.scales,
        args.zeros,
        args.bias,
        buffers.activated_PF,
        buffers.activated_sums if units.activated else buffers.activated_scale_P,
        buffers.sorted_R,
        buffers.block_slots,
        buffers.num_blocks,
        num_routes,
        grid_m,
        *args.strides,
        D=shape.model_dim,
        F=shape.hidden_dim,
        UNIT=units.x,
        OUT_UNIT=units.activated,
        TOP_K=problem.top_k,
        ACTIVATION=problem.activation,
        AMAX=codes_in_down(problem, choice.block_m, x_TD),
        **format_constants(slab, "gate_up", shape.model_dim),
        **tile_constants(tiles, problem.dtype, x_TD.device),
        **_grouped_constants(tiles, choice.block_m),
    )


def down(
    rows_RD: torch.Tensor, slab: Slab, problem: Problem, choice: Choice, num_routes: int, buffers: Buffers
) -> None:
    tiles, shape = choice.down, problem.shape
    if tiles.roles:
        with_roles = launch_hopper_words if problem.format in PACKED_FORMATS else launch_hopper
        with_roles.down(rows_RD, slab, problem, choice, num_routes, buffers, pdl_options(rows_RD.device))
        return
    args = weight_args(slab, "down", tiles)
    grid_m = max_blocks(num_routes, problem.num_slots, choice.block_m)
    amax = codes_in_down(problem, choice.block_m, rows_RD)
    fp8, unit = problem.format in FP8_FORMATS, sum_units(problem, choice).activated
    down_kernel[(grid_m * triton.cdiv(shape.model_dim, tiles.block_n * tiles.tiles_n),)](
        buffers.activated_codes_PF if fp8 and not amax else buffers.activated_PF,
        buffers.activated_sums if unit else buffers.activated_scale_P if fp8 else rows_RD,
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
        AMAX=amax,
        UNIT=unit,
        **format_constants(slab, "down", shape.hidden_dim),
        **tile_constants(tiles, problem.dtype, rows_RD.device),
        **_grouped_constants(tiles, choice.block_m),
    )


def reduce(rows_RD: torch.Tensor, weights_TK: torch.Tensor, buffers: Buffers, y_TD: torch.Tensor) -> None:
    tokens, model_dim = y_TD.shape
    block_d = min(next_power_of_two(model_dim), 512 if tokens <= 64 else 1024 if tokens <= 256 else 2048)
    reduce_kernel[(tokens, triton.cdiv(model_dim, block_d))](
        rows_RD,
        weights_TK,
        buffers.served_R,
        y_TD,
        D=model_dim,
        K=weights_TK.shape[1],
        BLOCK_D=block_d,
        num_warps=max(block_d // 256, 2),
        **pdl_options(y_TD.device),
    )
