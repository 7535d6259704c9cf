"""Token ids to vectors, and vectors to logits; a tied model uses one matrix for both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.linear import Linear, new_parameter


class Embedding(nn.Module):
    """ids int [T] -> rows of weight [V, D]. Ids must be in range: nothing is checked on the device."""

    def __init__(self, vocab_size: int, dim: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(vocab_size, dim, device=device, dtype=dtype)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_T, self.weight)


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
    ) -> None:
        if tied_to is None:
            super().__init__(dim, vocab_size, device=device, dtype=dtype)
        else:
            nn.Module.__init__(self)
            self.weight, self.bias = tied_to.weight, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()
