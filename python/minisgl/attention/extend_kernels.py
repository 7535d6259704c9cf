"""Triton kernel of prefill, with or without a cached prefix; conventions and helpers are those of `kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.attention.kernels import (
    LOG2E,
    LOWEST,
    accumulate,
    first_key,
    load_lens,
    load_pages,
    raw_logits,
    row_offsets,
)

_LOG2E = tl.constexpr(LOG2E)
_LOWEST = tl.constexpr(LOWEST)


@triton.jit
def _load(pointers, inside, MASKED: tl.constexpr):
    """A tile of keys or values; without MASKED all of it is inside, which spares a predicate a load."""
    if MASKED:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _extend_blocks(
    acc,
    m,
    l,
    q,
    lo,
    hi,
    kv_len,
    positions,  # of each row in its request
    k_ptr,
    v_ptr,
    table_ptr,
    scale_log2,
    stride_page,
    stride_row,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Blocks of keys lo .. hi for one tile of rows. Without MASKED every row sees every key of them."""
    c = tl.arange(0, BLOCK_C)
    pages = load_pages(table_ptr, lo, kv_len, PAGE_SIZE, BLOCK_N)
    for n in range(lo, hi, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        offsets = row_offsets(pages, n, stride_page, stride_row, PAGE_SIZE, BLOCK_N)[:, None] + c[None, :]
        pages = load_pages(table_ptr, n + BLOCK_N, kv_len, PAGE_SIZE, BLOCK_N)
        inside = (c < HEAD_DIM)[None, :]
        if MASKED:
            inside = inside & (keys < kv_len)[:, None]
        k = _load(k_ptr + offsets, inside, MASKED or BLOCK_C != HEAD_DIM)
        s = raw_logits(q, k, scale_log2, SOFT_CAP)
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            s = tl.where(visible, s, float("-inf"))
        v = _load(v_ptr + offsets, inside, MASKED or BLOCK_C != HEAD_DIM)
        acc, m, l = accumulate(acc, m, l, s, v, scale_log2, SOFT_CAP)
    return acc, m, l


@triton.jit(do_not_specialize=["num_requests", "stride_table"])
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [T, H, C]
    sinks_ptr,
    cu_q_ptr,
    kv_lens_ptr,
    table_ptr,
    num_requests,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_row,
    stride_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,  # requests with one row are left to decode_kernel
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of BLOCK_M (token, head) rows of one request and group over all keys they see. Grid (G, max_tiles)."""
    g, tile = tl.program_id(0), tl.program_id(1)
    q_lens, _ = load_lens(cu_q_ptr, kv_lens_ptr, num_requests, BLOCK_B)
    if SKIP_SINGLE:
        q_lens = tl.where(q_lens == 1, 0, q_lens)
    counts = tl.cdiv(q_lens * GROUP, BLOCK_M)
    b = tl.sum((tl.cumsum(counts, 0) <= tile).to(tl.int32), 0)
    if b >= num_requests:
        return
    requests = tl.arange(0, BLOCK_B)
    tile = (
        tl.sum(tl.where(requests <= b, counts, 0), 0) - 1 - tile
    )  # the last tile has most keys: start it first

    q_start = tl.load(cu_q_ptr + b)
    q_len = tl.load(cu_q_ptr + b + 1) - q_start
    kv_len = tl.load(kv_lens_ptr + b)
    prefix = kv_len - q_len
    r, c = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    token, head = r // GROUP, g * GROUP + r % GROUP
    first = prefix + tile * BLOCK_M // GROUP
    last = prefix + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
    inside = (token < q_len)[:, None] & (c < HEAD_DIM)[None, :]
    row = (q_start + token).to(tl.int64)
    q_ptrs = q_ptr + (row * stride_q_row + head * stride_q_head)[:, None] + c[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)

    m = tl.full([BLOCK_M], _LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        l += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    table_ptr += b.to(tl.int64) * stride_table
    k_ptr += g * stride_head
    v_ptr += g * stride_head
    # Keys [lo, hi) are seen by some row; blocks in [full_lo, full_hi) by all of them. A padding request (kv_len 0) has none.
    hi = tl.maximum(tl.minimum(last + 1, kv_len), 0)
    lo = first_key(first + 1, 1, WINDOW, BLOCK_N)
    full_lo = lo
    if WINDOW > 0:
        full_lo = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, hi)
    full_hi = tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, full_lo)
    if WINDOW > 0:
        acc, m, l = _extend_blocks(
            acc, m, l, q, tl.multiple_of(lo, BLOCK_N), full_lo, kv_len, token + prefix, k_ptr, v_ptr, table_ptr, scale_log2,
            stride_page, stride_row, True, HEAD_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, BLOCK_C, BLOCK_N,
        )  # fmt: skip
    acc, m, l = _extend_blocks(
        acc, m, l, q, full_lo, full_hi, kv_len, token + prefix, k_ptr, v_ptr, table_ptr, scale_log2,
        stride_page, stride_row, False, HEAD_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, BLOCK_C, BLOCK_N,
    )  # fmt: skip
    acc, m, l = _extend_blocks(
        acc, m, l, q, full_hi, hi, kv_len, token + prefix, k_ptr, v_ptr, table_ptr, scale_log2,
        stride_page, stride_row, True, HEAD_DIM, PAGE_SIZE, WINDOW, SOFT_CAP, BLOCK_C, BLOCK_N,
    )  # fmt: skip
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_ptrs = out_ptr + ((row * (tl.num_programs(0) * GROUP) + head) * HEAD_DIM)[:, None] + c[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
