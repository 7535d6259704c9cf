"""Write a step's keys and values into the cache: one launch on CUDA, where index_copy_ would take two.

The Triton kernel is used on CUDA when Triton is installed; everywhere else PyTorch's index_copy_ does the same.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

if importlib.util.find_spec("triton"):
    from minisgl.attention.kernels import store_kernel
else:  # pragma: no cover - platforms without Triton have no CUDA either
    store_kernel = None


def store_kv(
    k_PSGC: torch.Tensor,
    v_PSGC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    write_slots_T: torch.Tensor,
) -> None:
    """Copy row t of k and v to slot write_slots_T[t] (page * page_size + row) of the pools. In place; capturable."""
    if store_kernel is not None and k_PSGC.is_cuda:
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
