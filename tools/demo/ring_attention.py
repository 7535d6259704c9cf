"""Attention of one new token a row over a ring of the row's last W tokens, grouped queries, one launch.

Every row decodes in lockstep: at global step t all rows write slot t % W of their ring. A row's text began at its own step
`start`, so it may look at steps start..t, and rotary positions count from `start` too. Since a text is never longer than W, a
slot is overwritten only after the text that wrote it has ended. That is all the bookkeeping there is: no pages, no padding,
no prefill, and a row takes its next prompt one step after its last text ended.

`ring_attention` runs the Triton kernel on a GPU and `ring_attention_torch` elsewhere; a test holds one against the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _ring_attention_kernel(
    query, key, value, key_ring, value_ring, out, start, step,
    scale, row_stride,  # row_stride: elements from one row's query (or key, value) to the next row's
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (row, kv head): its GROUP queries, padded to 16 for the tensor cores, against the ring."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    now = tl.load(step)
    first = tl.load(start + row)
    dims, group = tl.arange(0, DIM), tl.arange(0, 16)
    in_group = (group < GROUP)[:, None]

    q = tl.load(
        query + row * row_stride + (head * GROUP + group)[:, None] * DIM + dims, mask=in_group, other=0.0
    )
    k_now = tl.load(key + row * row_stride + head * DIM + dims)
    v_now = tl.load(value + row * row_stride + head * DIM + dims)
    ring = (row * NUM_KV + head) * WINDOW * DIM
    tl.store(key_ring + ring + (now % WINDOW) * DIM + dims, k_now)
    tl.store(value_ring + ring + (now % WINDOW) * DIM + dims, v_now)

    # The new token comes from registers, not from the slot just written: other threads may not see that store yet.
    best = tl.sum(q.to(tl.float32) * k_now.to(tl.float32)[None, :], 1) * scale
    total = tl.full((16,), 1.0, tl.float32)
    acc = tl.zeros((16, DIM), tl.float32) + v_now.to(tl.float32)[None, :]
    for block in range(first, now, BLOCK):
        steps = block + tl.arange(0, BLOCK)
        slots = ring + (steps % WINDOW)[:, None] * DIM + dims
        valid = steps < now
        k = tl.load(key_ring + slots, mask=valid[:, None], other=0.0)
        v = tl.load(value_ring + slots, mask=valid[:, None], other=0.0)
        scores = tl.where(valid[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best
    result = acc / total[:, None]
    place = out + (row * NUM_KV * GROUP + head * GROUP + group)[:, None] * DIM + dims
    tl.store(place, result.to(out.dtype.element_ty), mask=in_group)


def ring_attention(
    qkv: torch.Tensor, rings: tuple[torch.Tensor, torch.Tensor], start: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """Attend and append: qkv [B, (H + 2 KV) * dim] after rotary; rings 2 x [B, KV, W, dim]; start [B], step [1], int64.

    Returns [B, H * dim]. Writes the new keys and values into the rings.
    """
    if not qkv.is_cuda:
        return ring_attention_torch(qkv, rings, start, step)
    keys, values = rings
    batch, num_kv, window, dim = keys.shape
    num_heads = qkv.shape[1] // dim - 2 * num_kv
    out = torch.empty(batch, num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    key, value = qkv[:, num_heads * dim :], qkv[:, (num_heads + num_kv) * dim :]
    _ring_attention_kernel[(batch, num_kv)](
        qkv, key, value, keys, values, out, start, step, dim**-0.5, qkv.stride(0),
        NUM_KV=num_kv, GROUP=num_heads // num_kv, WINDOW=window, DIM=dim, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return out


def ring_attention_torch(
    qkv: torch.Tensor, rings: tuple[torch.Tensor, torch.Tensor], start: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """The definition of `ring_attention`, in plain torch."""
    keys, values = rings
    batch, num_kv, window, dim = keys.shape
    num_heads = qkv.shape[1] // dim - 2 * num_kv
    query, key, value = qkv.split([num_heads * dim, num_kv * dim, num_kv * dim], dim=1)
    slot = int(step) % window
    keys[:, :, slot] = key.view(batch, num_kv, dim)
    values[:, :, slot] = value.view(batch, num_kv, dim)
    age = (slot - torch.arange(window, device=qkv.device)) % window  # 0 is the new token
    visible = age[None, :] <= (step - start)[:, None]
    grouped = query.view(batch, num_kv, num_heads // num_kv, dim).float()
    scores = torch.einsum("bkgd,bkwd->bkgw", grouped, keys.float()) * dim**-0.5
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    return (
        torch.einsum("bkgw,bkwd->bkgd", weights, values.float()).reshape(batch, num_heads * dim).to(qkv.dtype)
    )
