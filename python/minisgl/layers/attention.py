"""One attention layer around an attention backend: project, normalise heads, rotate, write the cache,
attend, project.

Over several ranks each has a part of the heads and computes attention for them alone; the last projection sums
over all. Where there are fewer key/value heads than ranks, neighbouring ranks hold copies of the same head.

Shape letters: T tokens, D model dim, H query heads, G key/value heads, C head_dim; H and G are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from minisgl.attention.base import AttentionBackend, AttentionBatch, AttentionProblem, LayerCache
from minisgl.layers.fp8 import Fp8Storage
from minisgl.layers.launch import HeadNorms, rotate_and_store, use_kernels
from minisgl.layers.linear import MergedLinear, RowLinear, Shards, new_parameter
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import apply_rotary
from minisgl.parallel import SOLO, Group, Shard


@dataclass(frozen=True)
class Heads:
    """One rank's query heads and key/value heads, and the group that shares them."""

    q: Shard
    kv: Shard
    group: Group = SOLO

    @classmethod
    def share(cls, num_heads: int, num_kv_heads: int, group: Group) -> Heads:
        """This rank's part of a model's heads. ValueError, with the remedy, if they can't be shared evenly."""
        size = group.size
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            raise ValueError(
                f"--tp={size} does not fit a model of {num_heads} heads and {num_kv_heads} key/value heads: "
                "use a number that divides both, or a multiple of the key/value heads that divides the heads"
            )
        parts = min(size, num_kv_heads)
        return cls(group.shard(num_heads), Shard(num_kv_heads, group.rank * parts // size, parts), group)


@dataclass(frozen=True)
class Projections:
    """What the projections of an attention layer are: with which biases, and stored how (fp8 None: in the layer's dtype)."""

    qkv_bias: bool = False
    out_bias: bool = False
    fp8: Fp8Storage | None = None


class Attention(nn.Module):
    """Grouped-query attention. `problem` says this rank's heads, head_dim, dtype, scale and window; `backend`
    computes it. heads: which of the model's these are; None: all of them.

    qk_norm_eps: epsilon of the RMSNorm on each head's q and k (Qwen3), None where the model has none.
    """

    def __init__(
        self,
        model_dim: int,
        problem: AttentionProblem,
        backend: AttentionBackend,
        *,
        projections: Projections | None = None,
        qk_norm_eps: float | None = None,
        device: torch.device,
        heads: Heads | None = None,
    ) -> None:
        super().__init__()
        self.problem, self.backend = problem, backend
        dim, dtype = problem.head_dim, problem.dtype
        projections = projections or Projections()
        heads = heads or Heads(Shard(problem.num_heads), Shard(problem.num_kv_heads))
        assert (heads.q.length, heads.kv.length) == (problem.num_heads, problem.num_kv_heads)
        q, kv = (replace(shard, total=shard.total * dim) for shard in (heads.q, heads.kv))
        parts = {"q": q, "k": kv, "v": kv}
        self.qkv = MergedLinear(
            model_dim, parts, bias=projections.qkv_bias, device=device, dtype=dtype, fp8=projections.fp8
        )
        self.out = RowLinear(
            q.total,
            model_dim,
            bias=projections.out_bias,
            device=device,
            dtype=dtype,
            group=heads.group,
            fp8=projections.fp8,
        )
        self.q_heads, self.sinks = heads.q, None
        if problem.has_sinks:
            self.sinks = new_parameter(problem.num_heads, device=device, dtype=dtype)
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
        qkv_TX = self.qkv(x_TD)
        if use_kernels(qkv_TX):
            slots_T = batch.write_slots_T
            q_THC = rotate_and_store(qkv_TX, self.problem, self.head_norms(), rotation, cache, slots_T)
        else:
            q_THC = self.rotate_and_store(qkv_TX, rotation, cache, batch)
        y_THC = self.backend.forward(q_THC, cache, batch, plan, self.problem, self.sinks)
        return self.out(y_THC.flatten(-2))

    def shards(self) -> Shards:
        """Places that hold a part of the checkpoint's tensor, the projections' own aside."""
        return {} if self.sinks is None else {"sinks": (0, self.q_heads)}

    def head_norms(self) -> HeadNorms | None:
        """What the kernel needs to know of q_norm and k_norm."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def rotate_and_store(
        self,
        qkv_TX: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """q [T, H, C], normalised and rotated; k likewise and v go to the cache. The definition of the kernel's work."""
        q, k, v = self.qkv.split(qkv_TX)
        q_THC = q.unflatten(-1, (self.problem.num_heads, self.problem.head_dim))
        k_TGC = k.unflatten(-1, (self.problem.num_kv_heads, self.problem.head_dim))
        v_TGC = v.unflatten(-1, (self.problem.num_kv_heads, self.problem.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THC, k_TGC = self.q_norm(q_THC), self.k_norm(k_TGC)
        q_THC, k_TGC = apply_rotary(q_THC, *rotation), apply_rotary(k_TGC, *rotation)
        cache.write(k_TGC, v_TGC, batch.write_slots_T)
        return q_THC
