"""Host side of the layers' kernels: one launch a function, from tensors to grids and compile-time constants.

The layers use them where `use_kernels` says so (CUDA, where Triton is always installed) and their own torch code elsewhere:
that code is the definition. Nothing here waits for the device, and everything may be captured.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from minisgl.attention.base import AttentionProblem, LayerCache

HAS_TRITON = importlib.util.find_spec("triton") is not None  # platforms without it have no CUDA either
# Any: Triton's launch syntax is beyond type checkers.
kernels: Any = importlib.import_module("minisgl.layers.kernels") if HAS_TRITON else None

FEW_TOKENS = 64  # up to here a launch is latency, and many small programs beat few large ones


def use_kernels(x: torch.Tensor) -> bool:
    """Whether the layers launch kernels for this input."""
    return HAS_TRITON and x.is_cuda


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_options(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch, for kernel and driver alike."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()


def _warps(elements: int, most: int = 16) -> int:
    """Warps for a tile of this power of two: 8 elements (16 bytes of bf16) a thread."""
    return min(max(elements // 256, 1), most)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RMSNorm.add`: (norm(x + residual), x + residual), x [..., D]. residual None: (norm(x), x)."""
    dim = x.shape[-1]
    rows = x.reshape(-1, dim)
    left = rows if residual is None else residual.reshape(-1, dim)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    assert rows.stride(-1) == left.stride(-1) == weight_D.stride(0) == 1 and left.shape == rows.shape
    assert x.dtype == left.dtype == weight_D.dtype
    if len(rows):  # an empty grid is an error on CUDA
        block = _power_of_two(dim)
        kernels.add_rms_norm_kernel[(len(rows),)](
            rows,
            left,
            weight_D,
            y,
            total,
            rows.stride(0),
            left.stride(0),
            eps,
            D=dim,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
            **dependent_options(x.device),
        )
    return y, total


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of each head of q and of k: weights [C]."""

    q_weight_C: torch.Tensor
    k_weight_C: torch.Tensor
    eps: float


def rotate_and_store(
    qkv_TX: torch.Tensor,
    problem: AttentionProblem,
    norms: HeadNorms | None,
    rotation: tuple[torch.Tensor, torch.Tensor],
    cache: LayerCache,
    write_slots_T: torch.Tensor,
) -> torch.Tensor:
    """q [T, H, C], normalised and rotated, out of the merged projection [T, (H + 2 G) * C]; k and v go to their slots.

    rotation: cos, sin [T, 1, J]. The cache is written in place.
    """
    cos_T1J, sin_T1J = rotation
    tokens, heads, kv_heads, dim = len(qkv_TX), problem.num_heads, problem.num_kv_heads, problem.head_dim
    k_PSGC, v_PSGC = cache.k_PSGC, cache.v_PSGC
    assert qkv_TX.shape[1] == (heads + 2 * kv_heads) * dim and qkv_TX.stride(1) == 1
    assert cos_T1J.stride() == sin_T1J.stride() and cos_T1J.stride(2) == 1 and len(cos_T1J) == tokens
    assert k_PSGC.stride() == v_PSGC.stride() and k_PSGC.stride(0) == k_PSGC.shape[1] * k_PSGC.stride(1)
    assert k_PSGC.stride(3) == 1 and qkv_TX.dtype == k_PSGC.dtype == cos_T1J.dtype
    q_THC = torch.empty((tokens, heads, dim), dtype=qkv_TX.dtype, device=qkv_TX.device)
    if tokens == 0:
        return q_THC
    block_h, block_c = 2 if tokens <= FEW_TOKENS else 8, _power_of_two(dim)
    kernels.rotate_and_store_kernel[(tokens, -(-(heads + 2 * kv_heads) // block_h))](
        qkv_TX,
        qkv_TX if norms is None else norms.q_weight_C,
        qkv_TX if norms is None else norms.k_weight_C,
        cos_T1J,
        sin_T1J,
        write_slots_T,
        q_THC,
        k_PSGC,
        v_PSGC,
        qkv_TX.stride(0),
        cos_T1J.stride(0),
        k_PSGC.stride(1),
        k_PSGC.stride(2),
        0.0 if norms is None else norms.eps,
        H=heads,
        G=kv_heads,
        C=dim,
        J=cos_T1J.shape[2],
        HAS_NORM=norms is not None,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        num_warps=_warps(block_h * block_c, 8),
        enable_fp_fusion=False,  # torch rounds the products of a rotation before it adds them
        **dependent_options(qkv_TX.device),
    )
    return q_THC


FUSED_ACTIVATIONS = ("silu", "gelu")


def gated_activation(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """`moe.base.activate` of [T, 2F] for one of FUSED_ACTIVATIONS."""
    assert activation in FUSED_ACTIVATIONS and gate_up_TF.ndim == 2 and gate_up_TF.stride(1) == 1
    tokens, hidden = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty((tokens, hidden), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if tokens == 0:
        return y_TF
    block = min(_power_of_two(hidden), 256 if tokens <= FEW_TOKENS else 2048)
    kernels.gated_activation_kernel[(tokens, -(-hidden // block))](
        gate_up_TF,
        y_TF,
        gate_up_TF.stride(0),
        F=hidden,
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=_warps(block, 8),
        **dependent_options(gate_up_TF.device),
    )
    return y_TF


@dataclass(frozen=True)
class LinearTile:
    """How few rows are multiplied. tensor_cores: `skinny_linear_kernel`, up to MAX_ROWS; else `vector_linear_kernel`, one."""

    tensor_cores: bool
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


MAX_ROWS = 16  # columns of the tensor cores' tile that `skinny_linear_kernel` pads to
SKINNY_ROWS = 8  # largest number of rows that was measured


def choose_tile(rows: int, out_dim: int, in_dim: int, dtype: torch.dtype) -> LinearTile | None:
    """Tile for a product of few rows, None where cuBLAS is as fast or the rows are many.

    From benchmark/results/layers.jsonl (H200, bf16): one row gains 18 to 60 % everywhere; two to eight rows gain
    where there are very many or very few outputs, and nothing in between. All sizes of a class share one tile, in which
    a row's sum does not depend on the number of rows: padding a batch, as CUDA graphs do, changes no bit.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not 1 <= rows <= SKINNY_ROWS:
        return None
    if rows == 1:
        block_n, block_k = (8, 1024) if out_dim > 4096 else (4, 2048)
        return LinearTile(False, block_n, min(block_k, _power_of_two(in_dim)), num_warps=4)
    if out_dim >= 65_536:
        return LinearTile(True, 64, 128, num_warps=4, num_stages=4)
    if out_dim <= 256:
        return LinearTile(True, 32, 256, num_warps=4, num_stages=4)
    return None


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """F.linear, by the faster of cuBLAS and the kernels for few rows."""
    tile = None
    if x.ndim == 2 and use_kernels(x):
        tile = choose_tile(x.shape[0], weight_NK.shape[0], weight_NK.shape[1], x.dtype)
    return F.linear(x, weight_NK, bias_N) if tile is None else few_rows_linear(x, weight_NK, bias_N, tile)


def few_rows_linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, tile: LinearTile
) -> torch.Tensor:
    """x @ weight.T + bias [M, N], M up to MAX_ROWS, or 1 without tensor cores; the sum in float32, one rounding."""
    (rows, in_dim), out_dim = x_MK.shape, weight_NK.shape[0]
    assert 0 < rows <= (MAX_ROWS if tile.tensor_cores else 1)
    assert weight_NK.is_contiguous() and x_MK.stride(1) == 1 and x_MK.dtype == weight_NK.dtype
    y_MN = torch.empty((rows, out_dim), dtype=x_MK.dtype, device=x_MK.device)
    options = {
        "K": in_dim,
        "HAS_BIAS": bias_N is not None,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **dependent_options(x_MK.device),
    }
    grid = (-(-out_dim // tile.block_n),)
    bias = weight_NK if bias_N is None else bias_N
    if tile.tensor_cores:
        kernels.skinny_linear_kernel[grid](
            x_MK, weight_NK, bias, y_MN, rows, out_dim, x_MK.stride(0), BLOCK_M=MAX_ROWS, **options
        )
    else:
        kernels.vector_linear_kernel[grid](x_MK, weight_NK, bias, y_MN, out_dim, **options)
    return y_MN
