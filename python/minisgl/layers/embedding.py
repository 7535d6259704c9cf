"""Token ids to vectors, and vectors to logits; a tied model uses one matrix for both.

Over several ranks each holds a part of the vocabulary. A token's vector comes from the rank that has it (the others add
zero, which is exact); logits of all parts are put side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.linear import Linear, Shards, new_parameter
from minisgl.parallel import SOLO, Group


class Embedding(nn.Module):
    """ids int [T] -> rows of weight [V, D]. Ids must be in range: nothing is checked on the device."""

    def __init__(
        self, vocab_size: int, dim: int, *, device: torch.device, dtype: torch.dtype, group: Group = SOLO
    ) -> None:
        super().__init__()
        self.rows = group.shard(vocab_size)
        self.weight = new_parameter(self.rows.width, dim, device=device, dtype=dtype)
        self._group = group

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.rows.length == self.rows.total:
            return F.embedding(ids_T, self.weight)
        local_T = ids_T - self.rows.start
        elsewhere_T = (local_T < 0) | (local_T >= self.rows.length)
        x_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self._group.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0.0))

    def shards(self) -> Shards:
        """Places that hold a part of the checkpoint's tensor."""
        return {"weight": (0, self.rows)}


class LmHead(Linear):
    """Hidden states [N, D] -> logits float32 [N, V]. tied_to: share this embedding's weight instead of
    having one.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        tied_to: Embedding | None = None,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = SOLO,
    ) -> None:
        self.rows = group.shard(vocab_size)
        if tied_to is None:
            super().__init__(dim, self.rows.width, device=device, dtype=dtype)
        else:
            nn.Module.__init__(self)
            self.weight, self.bias = tied_to.weight, None
        self._group = group

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._group.all_gather(super().forward(x), dim=-1)[..., : self.rows.total]
        return logits.float() if out is None else out.copy_(logits)

    def shards(self) -> Shards:
        return {"weight": (0, self.rows)}
