"""Matrix products with a weight [out, in], alone or several of one input merged into one.

`places` names every tensor a checkpoint fills in, as views of where it finally lives: a loader copies into
them and knows nothing about merging. `shards` says which of them hold only a part of the checkpoint's tensor,
because several ranks share it, `fp8_weights` which of them are codes (`layers.fp8`). Parameters are allocated on the
given device and hold whatever was there (`meta` holds nothing).

Over several ranks a pair of products needs one sum: the first (MergedLinear) holds a part of the output rows,
the second (RowLinear) the same part of the input columns, and adds up what all ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import nn

from minisgl.layers.fp8 import CODES, Fp8Storage, Fp8Weight, fp8_linear
from minisgl.layers.launch import linear
from minisgl.parallel import Group, Shard

Shards = dict[str, tuple[int, Shard]]
"""Place -> (dim, part of that dim) of the checkpoint's tensor; whole tensors are not listed."""


def new_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that never wants a gradient."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x [..., in] -> [..., out]: x @ weight.T + bias. fp8: how the weight is stored, None for plain numbers in `dtype`."""

    bias: nn.Parameter | None
    scale: nn.Parameter | None

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
        fp8: Fp8Storage | None = None,
    ) -> None:
        super().__init__()
        stored = dtype if fp8 is None else CODES
        self.weight = new_parameter(out_dim, in_dim, device=device, dtype=stored)
        self.bias = new_parameter(out_dim, device=device, dtype=dtype) if bias else None
        self.scale = None
        if fp8 is not None:
            self.scale = new_parameter(out_dim, fp8.num_groups(in_dim), device=device, dtype=torch.float32)
            self._group_size = fp8.group or in_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias, whichever way the weight is stored."""
        weight = self.fp8_weight()
        return linear(x, self.weight, bias) if weight is None else fp8_linear(x, weight, bias)

    def fp8_weight(self) -> Fp8Weight | None:
        """The whole weight, where it is stored as fp8."""
        return None if self.scale is None else Fp8Weight(self.weight, self.scale, self._group_size)

    def places(self) -> dict[str, torch.Tensor]:
        """What a checkpoint fills in: `weight`, which holds codes where `fp8_weights` names it, and `bias`."""
        tensors = {"weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def fp8_weights(self) -> dict[str, Fp8Weight]:
        """Places that hold codes, with their scales."""
        weight = self.fp8_weight()
        return {} if weight is None else {"weight": weight}

    def shards(self) -> Shards:
        """Places that hold a part of the checkpoint's tensor."""
        return {}


class RowLinear(Linear):
    """x [..., part of in] -> [..., out], summed over the ranks of `group`, which share the input dim."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
        group: Group,
        fp8: Fp8Storage | None = None,
    ) -> None:
        self.columns = group.shard(in_dim)
        super().__init__(self.columns.width, out_dim, bias=bias, device=device, dtype=dtype, fp8=fp8)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self._group.rank == 0 else None  # once in the sum
        return self._group.all_reduce(self.product(x, bias))

    def shards(self) -> Shards:
        return {"weight": (1, self.columns)}


class MergedLinear(Linear):
    """Several projections of one input as one product: one launch, and the input is read once.

    parts: name -> this rank's part of its output, in the order of the rows of the merged weight, e.g. {"q":
    Shard(4096), "k": Shard(512), "v": Shard(512)}.
    """

    def __init__(
        self,
        in_dim: int,
        parts: Mapping[str, Shard],
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
        fp8: Fp8Storage | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.widths = [part.width for part in parts.values()]
        super().__init__(in_dim, sum(self.widths), bias=bias, device=device, dtype=dtype, fp8=fp8)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output of `forward` [..., out] as views, one a part."""
        return y.split(self.widths, dim=-1)

    def places(self) -> dict[str, torch.Tensor]:
        """`part.weight` [width, in] and `part.bias` [width]: views into the merged tensors."""
        out = {}
        for name, rows in self._rows().items():
            out[f"{name}.weight"] = self.weight[rows]
            if self.bias is not None:
                out[f"{name}.bias"] = self.bias[rows]
        return out

    def fp8_weights(self) -> dict[str, Fp8Weight]:
        weight = self.fp8_weight()
        if weight is None:
            return {}
        return {f"{name}.weight": weight.rows(rows.start, rows.stop) for name, rows in self._rows().items()}

    def _rows(self) -> dict[str, slice]:
        """Which rows of the merged weight a part is."""
        stops = list(accumulate(self.widths))
        return {name: slice(stop - width, stop) for name, width, stop in zip(self.parts, self.widths, stops)}

    def shards(self) -> Shards:
        """As `places`: `part.weight` and `part.bias`."""
        return {
            f"{name}.{kind}": (0, part) for name, part in self.parts.items() for kind in ("weight", "bias")
        }
