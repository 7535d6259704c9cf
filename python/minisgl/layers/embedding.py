"""Token ids to vectors, and vectors to logits; a tied model uses one matrix for both.

The matrix may stay in host memory (--embedding-on-host), where a kernel reads the rows of a batch over the link: a decode step
needs a few KB of what may be a tenth of a small GPU's memory. Such memory is pinned, so that a CUDA graph can hold the read.

Over several ranks each holds a part of the vocabulary. A token's vector comes from the rank that has it (the others add
zero, which is exact); logits of all parts are put side by side.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers import launch
from minisgl.layers.fp8 import Fp8Storage
from minisgl.layers.linear import Linear, Shards, new_parameter
from minisgl.moe.store.pinned import CudaPinning, HostMemory
from minisgl.parallel import SOLO, Group

# Any: Triton's launch syntax is beyond type checkers.
kernels: Any = importlib.import_module("minisgl.layers.dense_kernels") if launch.HAS_TRITON else None

GATHER_BLOCK = 2048  # elements of a row that one program copies


class Embedding(nn.Module):
    """ids int [T] -> rows of weight [V, D]. Ids must be in range: nothing is checked on the device.

    on_host: keep the weight in host memory, pinned where `device` is a GPU. ValueError where the system refuses to pin it.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = SOLO,
        on_host: bool = False,
    ) -> None:
        super().__init__()
        self.rows = group.shard(vocab_size)
        self._group = group
        if on_host and device.type == "cuda":
            self._memory = HostMemory(CudaPinning(), 2**63)
            weight_VD = _pinned_rows(self._memory, self.rows.width, dim, dtype)
            self.weight = nn.Parameter(weight_VD, requires_grad=False)
        else:
            self.weight = new_parameter(self.rows.width, dim, device=device, dtype=dtype)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.rows.length == self.rows.total:
            return self._gather(ids_T)
        local_T = ids_T - self.rows.start
        elsewhere_T = (local_T < 0) | (local_T >= self.rows.length)
        x_TD = self._gather(local_T.masked_fill(elsewhere_T, 0))
        return self._group.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0.0))

    def _gather(self, ids_T: torch.Tensor) -> torch.Tensor:
        across = self.weight.device != ids_T.device
        return gather_rows(self.weight, ids_T) if across else F.embedding(ids_T, self.weight)

    def shards(self) -> Shards:
        """Places that hold a part of the checkpoint's tensor."""
        return {"weight": (0, self.rows)}


def _pinned_rows(memory: HostMemory, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, dim] in memory that kernels can read."""
    host = memory.allocate(num_rows, dim * dtype.itemsize)
    if host.num_pinned < num_rows:
        raise ValueError(
            f"--embedding-on-host needs {num_rows * dim * dtype.itemsize / 2**30:.2f} GiB of pinned host memory: "
            f"{memory.refusal}; leave it out, or raise the limit"
        )
    return host.records_EB.view(dtype)


def gather_rows(rows_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """[T, D] on the ids' device, by a kernel that reads rows_VD, contiguous, where it is: pinned host memory."""
    (num_tokens,), dim = ids_T.shape, rows_VD.shape[1]
    y_TD = torch.empty((num_tokens, dim), dtype=rows_VD.dtype, device=ids_T.device)
    assert rows_VD.is_contiguous() and ids_T.stride(0) == 1
    if num_tokens:  # an empty grid is an error on CUDA
        kernels.gather_rows_kernel[(num_tokens, -(-dim // GATHER_BLOCK))](
            ids_T,
            rows_VD,
            y_TD,
            D=dim,
            BLOCK=GATHER_BLOCK,
            num_warps=4,
            **launch.dependent_options(ids_T.device),
        )
    return y_TD


class LmHead(Linear):
    """Hidden states [N, D] -> logits float32 [N, V]. tied_to: share this embedding's weight instead of having one."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        tied_to: Embedding | None = None,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = SOLO,
        fp8: Fp8Storage | None = None,
    ) -> None:
        self.rows = group.shard(vocab_size)
        if tied_to is None:
            super().__init__(dim, self.rows.width, device=device, dtype=dtype, fp8=fp8)
        else:
            nn.Module.__init__(self)
            self.weight, self.bias, self.scale = tied_to.weight, None, None
        self._group = group

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._group.all_gather(super().forward(x), dim=-1)[..., : self.rows.total]
        return logits.float() if out is None else out.copy_(logits)

    def shards(self) -> Shards:
        return {"weight": (0, self.rows)}
