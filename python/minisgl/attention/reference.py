"""The definition of paged attention as a loop in float64, and random cases to hold a backend against it.

Tests of every tier and the benchmark share this file, so that all backends face the same ragged batches and
the same poison: whatever a request must not read (the dummy page, pages of nobody, the rest of a last page)
is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.attention.base import AttentionBatch, AttentionProblem, LayerCache


@dataclass(frozen=True)
class Case:
    """Everything one forward of attention takes. lens: (q_len, kv_len) of each request; kv_len 0 is a padding
    request.
    """

    problem: AttentionProblem
    batch: AttentionBatch
    cache: LayerCache
    q_THC: torch.Tensor
    sinks_H: torch.Tensor | None
    lens: tuple[tuple[int, int], ...]


def random_case(
    problem: AttentionProblem,
    lens: Sequence[tuple[int, int]],
    device: torch.device | str = "cpu",
    seed: int = 0,
    slack: int = 0,
    poison: float = float("nan"),
) -> Case:
    """A batch with these lengths on shuffled pages. slack adds to the upper bounds and to the page table's
    width.
    """
    gen = torch.Generator().manual_seed(seed)
    size, q_lens, kv_lens = problem.page_size, [q for q, _ in lens], [kv for _, kv in lens]
    need = [-(-kv // size) for kv in kv_lens]
    num_pages = 1 + sum(need) + 2
    order = (1 + torch.randperm(num_pages - 1, generator=gen)).tolist()
    table_BP = torch.zeros(len(lens), max([*need, 1]) + slack, dtype=torch.int32)
    for b, count in enumerate(need):
        table_BP[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    cu_q_B1 = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    max_lens = max([*q_lens, 1]), max([*kv_lens, 1])
    slots_T = torch.cat([_write_slots(table_BP[b], q, kv, size) for b, (q, kv) in enumerate(lens)])
    batch = AttentionBatch(
        cu_q_B1.to(device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        table_BP.to(device),
        slots_T.to(device),
        max_lens[0] + (slack if max_lens[0] > 1 else 0),
        max_lens[1] + slack * size,
    )
    shape = (2, num_pages, size, problem.num_kv_heads, problem.head_dim)
    k_PSGC, v_PSGC = torch.randn(shape, generator=gen).to(device=device, dtype=problem.dtype)
    unread_PS = torch.ones(num_pages, size, dtype=torch.bool)
    for b, kv in enumerate(kv_lens):
        j = torch.arange(kv)
        unread_PS[table_BP[b, j // size].long(), j % size] = False
    unread_PS = unread_PS.to(device)
    k_PSGC[unread_PS], v_PSGC[unread_PS] = poison, poison
    q_THC = torch.randn(sum(q_lens), problem.num_heads, problem.head_dim, generator=gen)
    sinks_H = torch.randn(problem.num_heads, generator=gen).to(device) if problem.has_sinks else None
    q_THC = q_THC.to(device=device, dtype=problem.dtype)
    return Case(problem, batch, LayerCache(k_PSGC, v_PSGC), q_THC, sinks_H, tuple(lens))


def _write_slots(table_P: torch.Tensor, q_len: int, kv_len: int, size: int) -> torch.Tensor:
    """Slots of the last q_len tokens; a padding request writes row 0 of the dummy page."""
    if kv_len == 0:
        return torch.zeros(q_len, dtype=torch.int64)
    j = torch.arange(kv_len - q_len, kv_len)
    return table_P[j // size].long() * size + j % size


def attention_loop(case: Case) -> torch.Tensor:
    """[T, H, C] in float64: for each request, row and head the plain formula over the keys it may see."""
    problem, size = case.problem, case.problem.page_size
    k_PSGC, v_PSGC = case.cache.k_PSGC.double(), case.cache.v_PSGC.double()
    out_THC = torch.zeros(case.q_THC.shape, dtype=torch.float64, device=case.q_THC.device)
    row = 0
    for b, (q_len, kv_len) in enumerate(case.lens):
        for i in range(q_len if kv_len else 0):
            position = kv_len - q_len + i
            oldest = 0 if problem.window is None else max(0, position - problem.window + 1)
            j = torch.arange(oldest, position + 1, device=case.q_THC.device)
            pages, rows = case.batch.page_table_BP[b, j // size].long(), j % size
            for h in range(problem.num_heads):
                g = h // problem.group_size
                logits = k_PSGC[pages, rows, g] @ case.q_THC[row + i, h].double() * problem.scale
                if problem.soft_cap is not None:
                    logits = problem.soft_cap * torch.tanh(logits / problem.soft_cap)
                weights = logits.exp()
                total = weights.sum()
                if case.sinks_H is not None:
                    total = total + case.sinks_H[h].double().exp()
                out_THC[row + i, h] = weights @ v_PSGC[pages, rows, g] / total
        row += q_len
    return out_THC


def max_error(got_THC: torch.Tensor, case: Case, want_THC: torch.Tensor | None = None) -> float:
    """Largest absolute difference from the loop (or from want) over rows of real requests; infinite if any
    row is not finite.
    """
    if not bool(torch.isfinite(got_THC).all()):
        return float("inf")
    want_THC = attention_loop(case) if want_THC is None else want_THC
    real_T = torch.cat([torch.full((q,), kv > 0) for q, kv in case.lens]).to(got_THC.device)
    return float((got_THC.double() - want_THC.double())[real_T].abs().amax()) if bool(real_T.any()) else 0.0
