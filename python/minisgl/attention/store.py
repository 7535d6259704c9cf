"""Write a step's keys and values into the cache: one launch on CUDA, where index_copy_ would take two.

The Triton kernel is used on CUDA when Triton is installed; everywhere else PyTorch's index_copy_ does the same.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None  # platforms without it have no CUDA either

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def store_kernel(
        k_ptr,
        v_ptr,
        k_cache_ptr,
        v_cache_ptr,
        slots_ptr,
        stride_k_row,
        stride_k_head,
        stride_v_row,
        stride_v_head,
        stride_slot,
        stride_head,
        HEAD_DIM: tl.constexpr,
        ROW: tl.constexpr,  # elements of a row: G * C
        BLOCK: tl.constexpr,
    ):
        """Copy one token's keys and values to its slot of the cache. Grid (T,)."""
        t = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots_ptr + t).to(tl.int64)
        e = tl.arange(0, BLOCK)
        head, c = e // HEAD_DIM, e % HEAD_DIM
        k = tl.load(k_ptr + t * stride_k_row + head * stride_k_head + c, mask=e < ROW)
        v = tl.load(v_ptr + t * stride_v_row + head * stride_v_head + c, mask=e < ROW)
        to = slot * stride_slot + head * stride_head + c
        tl.store(k_cache_ptr + to, k, mask=e < ROW)
        tl.store(v_cache_ptr + to, v, mask=e < ROW)


def store_kv(
    k_PSGC: torch.Tensor,
    v_PSGC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    write_slots_T: torch.Tensor,
) -> None:
    """Copy row t of k and v to slot write_slots_T[t] (page * page_size + row) of the pools. In place; capturable."""
    if HAS_TRITON and k_PSGC.is_cuda:
        launch_store(k_PSGC, v_PSGC, k_TGC, v_TGC, write_slots_T)
        return
    for pool_PSGC, rows_TGC in ((k_PSGC, k_TGC), (v_PSGC, v_TGC)):
        pool_PSGC.view(-1, *pool_PSGC.shape[2:]).index_copy_(0, write_slots_T, rows_TGC)


def launch_store(
    k_PSGC: torch.Tensor,
    v_PSGC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    write_slots_T: torch.Tensor,
) -> None:
    """The kernel behind `store_kv`. Rows may be strided views (slices of a fused qkv projection); head_dim is contiguous."""
    num_tokens, num_kv_heads, head_dim = k_TGC.shape
    assert k_PSGC.stride() == v_PSGC.stride() and k_PSGC.stride(0) == k_PSGC.shape[1] * k_PSGC.stride(1)
    assert k_PSGC.stride(3) == k_TGC.stride(2) == v_TGC.stride(2) == 1 and k_TGC.dtype == k_PSGC.dtype
    if num_tokens == 0:  # an empty grid is an error on CUDA
        return
    row = num_kv_heads * head_dim
    kernel: Any = store_kernel  # Triton's launch syntax is beyond type checkers
    kernel[(num_tokens,)](
        k_TGC,
        v_TGC,
        k_PSGC,
        v_PSGC,
        write_slots_T,
        k_TGC.stride(0),
        k_TGC.stride(1),
        v_TGC.stride(0),
        v_TGC.stride(1),
        k_PSGC.stride(1),
        k_PSGC.stride(2),
        HEAD_DIM=head_dim,
        ROW=row,
        BLOCK=1 << (row - 1).bit_length(),
    )
