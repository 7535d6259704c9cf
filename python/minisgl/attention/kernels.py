"""Triton kernels of attention over a paged cache: split decode, and what it shares with `extend_kernels`.

All kernels keep the statistics of the softmax in base 2 and fp32: m is the running maximum of the logits times
log2(e), l the running sum of exp2(logit - m), acc the running sum of exp2(logit - m) * v. Masked logits are -inf while m starts
at a finite -1e30, so a block that is masked as a whole adds exactly zero instead of NaN.

The query heads of one key/value head share its tiles: rows of a tile are (token, head of the group) pairs, token-major. So a
decode tile holds a whole group, and a prefill tile of 128 rows at group size 8 crosses the causal diagonal with 16 tokens only.

Grids are fixed by shapes and upper bounds; which request a program serves is worked out on the device from the lengths. So a
captured graph is valid for any content, and a mixed batch is spared the empty programs of a (longest x batch) grid.

    extend   tiles of all requests end to end; later (longer) tiles of a request first
    decode   chunks of keys of all requests end to end, about equally long; each is scaled by its own l, and `combine` weighs
             them with exp2(lse)

Decode is latency, so its two kernels may start while the one before drains (programmatic dependent launch, PDL). Until
`gdc_wait` returns they read lengths and page table only: whoever launches must have written those at least two kernels earlier.
Some program of every launch passes the wait, also if none has work: so a finished kernel means that all earlier ones are.

Integers that count tokens fit 32 bits; offsets into the cache are 64-bit, since a pool passes 2^31 elements easily.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = 1.4426950408889634
LOWEST = -1.0e30  # where a running maximum starts
LONG_CHUNK = 512  # keys after which a chunk's fixed cost (first loads, partial result) stops to matter
_LONG_CHUNK = tl.constexpr(LONG_CHUNK)
_LOG2E = tl.constexpr(LOG2E)
_LOWEST = tl.constexpr(LOWEST)


@triton.jit
def first_key(kv_len, q_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Oldest key that the oldest of the new rows sees, rounded down to a block."""
    if WINDOW > 0:
        oldest = tl.maximum(kv_len - q_len - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        oldest = kv_len * 0
    return oldest


@triton.jit
def load_lens(cu_q_ptr, kv_lens_ptr, num_requests, BLOCK_B: tl.constexpr):
    """q_len and kv_len of every request; zeros behind the last one."""
    b = tl.arange(0, BLOCK_B)
    inside = b < num_requests
    starts = tl.load(cu_q_ptr + b, mask=inside, other=0)
    ends = tl.load(cu_q_ptr + b + 1, mask=inside, other=0)
    return ends - starts, tl.load(kv_lens_ptr + b, mask=inside, other=0)


@triton.jit
def load_pages(table_ptr, n, hi, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of each key n .. n + BLOCK_N, or one scalar where a block cannot straddle pages. Keys from hi on read nothing."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_ptr + n // PAGE_SIZE, mask=n < hi, other=0)
    else:
        keys = n + tl.arange(0, BLOCK_N)
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < hi, other=0)
    return pages


@triton.jit
def row_offsets(pages, n, stride_page, stride_row, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """64-bit offset of each key's row in the cache."""
    if PAGE_SIZE % BLOCK_N == 0:
        in_page = n % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        in_page = (n + tl.arange(0, BLOCK_N)) % PAGE_SIZE
    return pages.to(tl.int64) * stride_page + in_page * stride_row


@triton.jit
def raw_logits(q, k, scale_log2, SOFT_CAP: tl.constexpr):
    """Logits that `accumulate` has still to multiply by its scale: raw q.k, or with a cap the finished ones.

    tanh(x) = 1 - 2 / (exp(2x) + 1) saturates cleanly at both ends.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFT_CAP > 0.0:
        s = SOFT_CAP * _LOG2E * (1.0 - 2.0 / (tl.exp2(s * (scale_log2 * 2.0 / SOFT_CAP)) + 1.0))
    return s


@triton.jit
def accumulate(acc, m, l, s, v, scale_log2, SOFT_CAP: tl.constexpr):
    """One step of the online softmax with logits s [rows, keys] and values v [keys, C].

    The scale (positive) is applied after the maximum, where it fuses with the subtraction into one instruction an element.
    """
    if SOFT_CAP > 0.0:
        scale_log2 = 1.0
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, m_new, l


@triton.jit
def _split(q_lens, kv_lens, wave, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Chunk length and number of chunks of each request with a single new row.

    wave chunks fill the device once. Few keys: one wave, as short as a block. Many keys: four waves, which even out ragged
    lengths. In between chunks of LONG_CHUNK. `triton_paged.max_chunks` bounds the result on the host. Depends on the lengths
    only, not on padding requests, so that a graph and an eager run give the same bits.
    """
    spans = tl.where(q_lens == 1, kv_lens - first_key(kv_lens, 1, WINDOW, BLOCK_N), 0)
    total = tl.sum(spans, 0)
    target = tl.maximum(tl.minimum(tl.cdiv(total, wave), _LONG_CHUNK), tl.cdiv(total, 4 * wave))
    even = tl.cdiv(spans, tl.maximum(tl.cdiv(spans, tl.maximum(target, BLOCK_N)), 1))
    lengths = tl.cdiv(even, BLOCK_N) * BLOCK_N
    return lengths, tl.cdiv(spans, tl.maximum(lengths, 1))


@triton.jit(do_not_specialize=["num_requests", "wave", "stride_table"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [T, H, C]: where one chunk is all
    part_ptr,  # out fp32 [chunks, H, C]: attention over one chunk
    lse_ptr,  # out fp32 [chunks, H]: log2 of its softmax denominator
    first_chunk_ptr,  # out int32 [B]
    num_chunks_ptr,  # out int32 [B]
    sinks_ptr,
    cu_q_ptr,
    kv_lens_ptr,
    table_ptr,
    num_requests,
    wave,
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
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0.0: none
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One new row a request over one chunk of its keys, for the heads of one group. Grid (G, max_chunks)."""
    g, chunk = tl.program_id(0), tl.program_id(1)
    q_lens, kv_lens = load_lens(cu_q_ptr, kv_lens_ptr, num_requests, BLOCK_B)
    lengths, counts = _split(q_lens, kv_lens, wave, WINDOW, BLOCK_N)
    ends = tl.cumsum(counts, 0)
    requests = tl.arange(0, BLOCK_B)
    b = tl.sum((ends <= chunk).to(tl.int32), 0)
    is_first = (g == 0) & (chunk == 0)
    # The grid is an upper bound: most of it has nothing to do and leaves before the wait, which frees its place.
    if (b >= num_requests) & (not is_first):
        return
    length = tl.sum(tl.where(requests == b, lengths, 0), 0)
    count = tl.sum(tl.where(requests == b, counts, 0), 0)
    skipped = tl.sum(tl.where(requests < b, counts, 0), 0)
    kv_len = tl.sum(tl.where(requests == b, kv_lens, 0), 0)  # here already: saves the wait for another load
    row = tl.load(cu_q_ptr + tl.minimum(b, num_requests)).to(tl.int64)
    lo = tl.multiple_of(first_key(kv_len, 1, WINDOW, BLOCK_N) + (chunk - skipped) * length, BLOCK_N)
    hi = tl.minimum(lo + length, kv_len)
    table_ptr += tl.minimum(b, num_requests - 1).to(tl.int64) * stride_table
    pages = load_pages(table_ptr, lo, hi, PAGE_SIZE, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if is_first:  # for `combine`, which would have to repeat all of the above
        tl.store(first_chunk_ptr + requests, ends - counts, mask=requests < num_requests)
        tl.store(num_chunks_ptr + requests, counts, mask=requests < num_requests)
    if b >= num_requests:
        return

    h, c = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
    heads_inside = (h < GROUP)[:, None] & (c < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + row * stride_q_row + (g * GROUP + h)[:, None] * stride_q_head + c[None, :]
    q = tl.load(q_ptrs, mask=heads_inside, other=0.0)

    k_ptr += g * stride_head
    v_ptr += g * stride_head
    m = tl.full([BLOCK_H], _LOWEST, tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for n in range(lo, hi, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        offsets = row_offsets(pages, n, stride_page, stride_row, PAGE_SIZE, BLOCK_N)[:, None] + c[None, :]
        # The next block's pages are fetched one step early: the loads of k and v need not wait for their addresses.
        pages = load_pages(table_ptr, n + BLOCK_N, hi, PAGE_SIZE, BLOCK_N)
        inside = (keys < hi)[:, None] & (c < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
        s = raw_logits(q, k, scale_log2, SOFT_CAP)
        visible = keys < hi
        if WINDOW > 0:
            visible = visible & (keys >= kv_len - WINDOW)
        s = tl.where(visible[None, :], s, float("-inf"))
        v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
        acc, m, l = accumulate(acc, m, l, s, v, scale_log2, SOFT_CAP)

    heads = tl.num_programs(0) * GROUP
    if count == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + g * GROUP + h, mask=h < GROUP, other=0.0).to(tl.float32)
            l += tl.exp2(sink * _LOG2E - m)
        out_ptrs = out_ptr + (row * heads + g * GROUP + h)[:, None] * HEAD_DIM + c[None, :]
        tl.store(out_ptrs, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=heads_inside)
        return
    head = chunk.to(tl.int64) * heads + g * GROUP + h
    tl.store(lse_ptr + head, m + tl.log2(l), mask=h < GROUP)
    tl.store(part_ptr + head[:, None] * HEAD_DIM + c[None, :], acc / l[:, None], mask=heads_inside)


@triton.jit
def combine_kernel(
    out_ptr,  # [T, H, C]
    part_ptr,
    lse_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    cu_q_ptr,
    sinks_ptr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weigh the chunks of one request and head, and the sink. No chunks (padding) give zeros. Grid (B, H)."""
    b, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(cu_q_ptr + b).to(tl.int64)
    is_single = tl.load(cu_q_ptr + b + 1) == row + 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if not is_single:
        return
    first, count = tl.load(first_chunk_ptr + b), tl.load(num_chunks_ptr + b)
    if count == 1:  # `decode_kernel` wrote the output
        return
    m = tl.full([1], _LOWEST, tl.float32)
    l = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        m = m * 0.0 + tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        l += 1.0
    acc = tl.zeros([BLOCK_C], tl.float32)
    c = tl.arange(0, BLOCK_C)
    for s in range(0, count, BLOCK_S):
        chunks = s + tl.arange(0, BLOCK_S)
        index = (first + chunks).to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + index, mask=chunks < count, other=float("-inf"))
        inside = (chunks < count)[:, None] & (c < HEAD_DIM)[None, :]
        part = tl.load(part_ptr + index[:, None] * HEAD_DIM + c[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weights = tl.exp2(lse - m_new)
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        m = m_new
    acc = acc / tl.where(l == 0.0, 1.0, l)
    out_ptrs = out_ptr + (row * num_heads + head) * HEAD_DIM + c
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=c < HEAD_DIM)
