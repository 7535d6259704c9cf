"""Triton kernels of the layers around attention and experts; `launch` calls them, and the layers' torch code defines them.

A decode step is latency: these replace chains of element-wise launches by one launch each, with the roundings
of the chain they replace, so that in bf16 they give its bits but for the order of a sum. Each may start while
the kernel before it drains (`moe.kernels.dependent`), and reads weights, which no kernel writes, before its wait.

Shape letters: T tokens, D model dim, H query heads, G key/value heads, C head_dim, J rotated pairs, F hidden width,
M rows, N outputs, K inputs of a product.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,  # out [T, D]
    total_ptr,  # out [T, D], with HAS_RESIDUAL
    stride_x,
    stride_residual,
    eps,
    D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= D
    PDL: tl.constexpr,
):
    """One row of `RMSNorm.add`. Grid (T,)."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    dtype = y_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    start_next(PDL)
    x = tl.load(x_ptr + t * stride_x + d, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + t * stride_residual + d, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + t * D + d, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    y = weight * (x * scale).to(dtype).to(tl.float32)
    tl.store(y_ptr + t * D + d, y.to(dtype), mask=inside)


@triton.jit
def _normed(x, weight_ptr, other_weight_ptr, is_first, column, scale, inside, dtype: tl.constexpr):
    """Rows x [heads, C] scaled and weighted as `RMSNorm` rounds; rows of is_first by the first weight."""
    first = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(other_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_first[:, None], first[None, :], other[None, :])
    return (weight * (x * scale[:, None]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr,  # [T, (H + 2 G) * C]: heads of q, then of k, then of v
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,  # [T, J]
    sin_ptr,
    slots_ptr,
    q_ptr,  # out [T, H, C]
    k_cache_ptr,  # out, at [slot, head]
    v_cache_ptr,
    stride_qkv,
    stride_cos,
    stride_slot,
    stride_head,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,  # power of two >= C
    PDL: tl.constexpr,
):
    """Some heads of one token: normalise and rotate q and k, give q, write k and v to the cache. Grid (T, head blocks).

    Element c of a head rotates with c + J or c - J, which is loaded a second time (it lies in the L1 cache): no shuffle,
    and any head_dim and number of pairs will do.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_C)
    partner = tl.where(c < J, c + J, tl.where(c < 2 * J, c - J, c))
    rotates, inside = c < 2 * J, c < C
    dtype = q_ptr.dtype.element_ty
    wait_for_previous(PDL)
    start_next(PDL)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    cos = tl.load(cos_ptr + t * stride_cos + tl.minimum(c, partner), mask=rotates, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + t * stride_cos + tl.minimum(c, partner), mask=rotates, other=0.0).to(tl.float32)
    valid = (h < H + 2 * G)[:, None] & inside[None, :]
    head = qkv_ptr + t * stride_qkv + h[:, None] * C
    raw = tl.load(head + c[None, :], mask=valid, other=0.0)
    x = raw.to(tl.float32)
    other = tl.load(head + partner[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / C + eps)
        x = _normed(x, q_weight_ptr, k_weight_ptr, h < H, c, scale, inside, dtype)
        other = _normed(other, q_weight_ptr, k_weight_ptr, h < H, partner, scale, inside, dtype)
    along = (x * cos[None, :]).to(dtype).to(tl.float32)
    across = (other * sin[None, :]).to(dtype).to(tl.float32)
    turned = along + tl.where((c < J)[None, :], -across, across)
    turned = tl.where(rotates[None, :], turned, x).to(dtype)
    tl.store(q_ptr + (t * H + h)[:, None] * C + c[None, :], turned, mask=valid & (h < H)[:, None])
    is_k, is_v = (h >= H) & (h < H + G), h >= H + G
    k_row = k_cache_ptr + slot * stride_slot + (h - H)[:, None] * stride_head
    tl.store(k_row + c[None, :], turned, mask=valid & is_k[:, None])
    v_row = v_cache_ptr + slot * stride_slot + (h - H - G)[:, None] * stride_head
    tl.store(v_row + c[None, :], raw, mask=valid & is_v[:, None])


@triton.jit
def gated_activation_kernel(
    gate_up_ptr,  # [T, 2 F]
    y_ptr,  # out [T, F]
    stride_t,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up, or gelu, rounded between the two as `moe.base.activate`. Grid (T, blocks of F)."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    dtype = y_ptr.dtype.element_ty
    wait_for_previous(PDL)
    start_next(PDL)
    gate = tl.load(gate_up_ptr + t * stride_t + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * stride_t + F + f, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    else:
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(y_ptr + t * F + f, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


@triton.jit
def vector_linear_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]
    bias_ptr,
    y_ptr,  # out [N]
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """weight @ x on the ordinary cores in float32. Grid (blocks of N,).

    Weights are read once, and the first tile is on its way before the previous kernel has finished.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    w = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    start_next(PDL)
    y = tl.zeros((BLOCK_N,), tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        if k0 > 0:
            w = tl.load(rows + k0 + k[None, :], mask=(k0 + k < K)[None, :], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        y += tl.sum(w * x[None, :], 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def skinny_linear_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,
    y_ptr,  # out [M, N]
    M,
    N,
    stride_x,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 16: as many columns as a tensor core takes
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """x @ weight.T for up to BLOCK_M rows on tensor cores: outputs are the tile's rows. Grid (blocks of N,).

    A row's sum does not depend on M.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    w_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + m[None, :] * stride_x + k[:, None]
    wait_for_previous(PDL)
    start_next(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w = tl.load(w_ptrs + k0)
            x = tl.load(x_ptrs + k0, mask=(m < M)[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs + k0, mask=(k0 + k < K)[None, :], other=0.0)
            x = tl.load(x_ptrs + k0, mask=(m < M)[None, :] & (k0 + k < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y_ptr + m[None, :].to(tl.int64) * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)
