"""One attention layer around an attention backend: project, normalise heads, rotate, write the cache,
attend, project.

Shape letters: T tokens, D model dim, H query heads, G key/value heads, C head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minisgl.attention.base import AttentionBackend, AttentionBatch, AttentionProblem, LayerCache
from minisgl.layers.linear import Linear, MergedLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import apply_rotary


class Attention(nn.Module):
    """Grouped-query attention. `problem` says heads, head_dim, dtype, scale and window; `backend` computes
    it.

    qk_norm_eps: epsilon of the RMSNorm on each head's q and k (Qwen3), None where the model has none.
    """

    def __init__(
        self,
        model_dim: int,
        problem: AttentionProblem,
        backend: AttentionBackend,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.problem, self.backend = problem, backend
        dim, dtype = problem.head_dim, problem.dtype
        q_dim, kv_dim = problem.num_heads * dim, problem.num_kv_heads * dim
        parts = {"q": q_dim, "k": kv_dim, "v": kv_dim}
        self.qkv = MergedLinear(model_dim, parts, bias=qkv_bias, device=device, dtype=dtype)
        self.out = Linear(q_dim, model_dim, bias=out_bias, device=device, dtype=dtype)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(dim, qk_norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(dim, qk_norm_eps, device=device, dtype=dtype)

    def forward(
        self,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        batch: AttentionBatch,
        plan: Any,
    ) -> torch.Tensor:
        """y [T, D]. rotation: what `Rotary` gives for the tokens' positions. Writes this step's keys and
        values.
        """
        q, k, v = self.qkv.split(self.qkv(x_TD))
        q_THC = q.unflatten(-1, (self.problem.num_heads, self.problem.head_dim))
        k_TGC = k.unflatten(-1, (self.problem.num_kv_heads, self.problem.head_dim))
        v_TGC = v.unflatten(-1, (self.problem.num_kv_heads, self.problem.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THC, k_TGC = self.q_norm(q_THC), self.k_norm(k_TGC)
        q_THC, k_TGC = apply_rotary(q_THC, *rotation), apply_rotary(k_TGC, *rotation)
        cache.write(k_TGC, v_TGC, batch.write_slots_T)
        y_THC = self.backend.forward(q_THC, cache, batch, plan, self.problem)
        return self.out(y_THC.flatten(-2))
