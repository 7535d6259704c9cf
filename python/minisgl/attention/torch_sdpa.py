"""Attention by PyTorch's scaled_dot_product_attention, a request at a time: the reference, and for CPUs.

The pages of a request are gathered into one contiguous run of keys and values, so that what is multiplied is
exactly what a dense implementation would see: results do not depend on the page size, on the other requests
of the batch, or on what lies in the unused rows of a page. A padded batch would need fewer calls but would
give up all three; on a CPU a call costs 15 us.

Shapes inside: a request has q new tokens (rows), n keys it can see at all; G key/value heads of J query heads
each (H = G * J).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.attention.base import AttentionBatch, AttentionProblem, LayerCache

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Span:
    """One request's part of the step: rows of q, and the keys they may see.

    pages_P: int64 pages that hold the keys: rows first .. first + num_keys of these pages laid end to end.
    mask_QN: which key each row sees; None if causal order alone decides (is_causal) or every row sees all.
    """

    start_row: int
    end_row: int
    pages_P: torch.Tensor
    first: int
    num_keys: int
    is_causal: bool
    mask_QN: torch.Tensor | None


def plan_span(
    rows: tuple[int, int], kv_len: int, page_table_P: torch.Tensor, problem: AttentionProblem
) -> Span:
    """Choose the keys to gather and the mask. A window drops the pages in front that no row can see any more."""
    q_len = rows[1] - rows[0]
    prefix, size, window = kv_len - q_len, problem.page_size, problem.window
    oldest = 0 if window is None else max(0, prefix - window + 1)
    pages_P = page_table_P[oldest // size : -(-kv_len // size)].long()
    num_keys = kv_len - oldest
    # A single row sees all its keys, a square of rows and keys is plain causal order: both need no mask (fast
    # path).
    square = num_keys == q_len and (window is None or q_len <= window)
    mask_QN = None
    if q_len > 1 and not square:
        query = torch.arange(prefix, kv_len, device=pages_P.device)[:, None]
        key = torch.arange(oldest, kv_len, device=pages_P.device)[None, :]
        mask_QN = key <= query
        if window is not None:
            mask_QN &= key > query - window
    return Span(*rows, pages_P, oldest % size, num_keys, q_len > 1 and square, mask_QN)


class TorchAttention:
    """`AttentionBackend` for any device PyTorch runs on, in fp32, fp16, bf16 or fp64."""

    name = "sdpa"
    graph_safe = False  # the plan reads lengths back to the host

    def supports(self, problem: AttentionProblem, device: torch.device) -> str | None:
        if problem.dtype not in DTYPES:
            return f"it computes in {', '.join(str(d) for d in DTYPES)}, not in {problem.dtype}"
        return None

    def plan(self, problem: AttentionProblem, batch: AttentionBatch) -> tuple[Span, ...]:
        """One Span for each request that has rows and keys. Synchronises with the device."""
        starts, kv_lens = batch.cu_q_B1.tolist(), batch.kv_lens_B.tolist()
        return tuple(
            plan_span((starts[b], starts[b + 1]), kv_len, batch.page_table_BP[b], problem)
            for b, kv_len in enumerate(kv_lens)
            if kv_len > 0 and starts[b + 1] > starts[b]
        )

    def forward(
        self,
        q_THC: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        plan: tuple[Span, ...],
        problem: AttentionProblem,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out_THC = q_THC.new_zeros(q_THC.shape)  # rows of padding requests stay zero
        for span in plan:
            q_HQC = q_THC[span.start_row : span.end_row].transpose(0, 1)
            k_GNC, v_GNC = (gather(pool, span) for pool in (cache.k_PSGC, cache.v_PSGC))
            if sinks_H is not None or problem.soft_cap is not None:
                y_HQC = explicit_attention(q_HQC, k_GNC, v_GNC, span, problem, sinks_H)
            else:
                y_HQC = F.scaled_dot_product_attention(
                    q_HQC[None],
                    k_GNC[None],
                    v_GNC[None],
                    attn_mask=span.mask_QN,
                    is_causal=span.is_causal,
                    scale=problem.scale,
                    enable_gqa=problem.group_size > 1,
                )[0]
            out_THC[span.start_row : span.end_row] = y_HQC.transpose(0, 1)
        return out_THC


def gather(pool_PSGC: torch.Tensor, span: Span) -> torch.Tensor:
    """The keys or values of one request, [G, n, C]; rows of the last page beyond the request are not read."""
    rows_NGC = pool_PSGC[span.pages_P].flatten(0, 1)[span.first : span.first + span.num_keys]
    return rows_NGC.transpose(0, 1)


def explicit_attention(
    q_HQC: torch.Tensor,
    k_GNC: torch.Tensor,
    v_GNC: torch.Tensor,
    span: Span,
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what PyTorch's operator lacks: a cap on the logits and a sink in the denominator.
    Softmax in fp32 at least.

    A sink is one more logit a head that takes its share of the probability and carries no value (gpt-oss).
    """
    wide = torch.promote_types(q_HQC.dtype, torch.float32)
    q_GJQC = q_HQC.to(wide).unflatten(0, (problem.num_kv_heads, problem.group_size))
    logits_GJQN = q_GJQC @ k_GNC.to(wide).transpose(1, 2)[:, None] * problem.scale
    if problem.soft_cap is not None:
        logits_GJQN = problem.soft_cap * torch.tanh(logits_GJQN / problem.soft_cap)
    mask_QN = span.mask_QN
    if span.is_causal:
        mask_QN = torch.ones(logits_GJQN.shape[-2:], dtype=torch.bool, device=q_HQC.device).tril()
    if mask_QN is not None:
        logits_GJQN = logits_GJQN.masked_fill(~mask_QN, float("-inf"))
    num_keys = span.num_keys
    if sinks_H is not None:
        sinks_GJQ1 = sinks_H.to(wide).view(problem.num_kv_heads, problem.group_size, 1, 1)
        logits_GJQN = torch.cat([logits_GJQN, sinks_GJQ1.expand(*logits_GJQN.shape[:3], 1)], dim=-1)
    probs_GJQN = torch.softmax(logits_GJQN, dim=-1)[..., :num_keys]
    return (probs_GJQN @ v_GNC.to(wide)[:, None]).flatten(0, 1).to(q_HQC.dtype)
