"""Reading no more of a checkpoint than this rank holds: slices of tensors in a mapped safetensors file.

A view is what `safe_open(...).get_slice(name)` gives: it knows its shape, and only the rows and columns asked of it are read.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl.moe.store.shard import ExpertShard
from minisgl.parallel import Shard


class MemoryView:
    """A tensor in memory, seen as one in a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def read_part(view: Any, dim: int, shard: Shard) -> torch.Tensor:
    """This rank's part of a tensor along `dim`."""
    return view[_at(dim, shard.start, shard.stop)]


def read_expert(view: Any, part: str, fused: bool, shard: ExpertShard) -> torch.Tensor:
    """What a store takes of an expert tensor `part`, or of one that holds all experts [E, ...] (fused): the experts and the
    part of F that `shard` names. A `down` bias that another rank adds comes as zeros.

    Raises ValueError for a tensor whose sizes are not the model's.
    """
    shape, cut = tuple(view.get_shape()), shard.cut(part)
    if fused and shape[:1] != (shard.num_experts,):
        raise ValueError(f"expected a leading dim of {shard.num_experts} experts, found shape {list(shape)}")
    dim = fused + (cut.dim if cut is not None else 0)
    if cut is not None and (len(shape) <= dim or shape[dim] != cut.total):
        raise ValueError(f"expected {cut.total} elements in dim {dim}, found shape {list(shape)}")
    ranges = [_at(dim, start, stop) for start, stop in cut.ranges] if cut is not None else [(slice(None),)]
    experts = [slice(first, last) for first, last in _runs(shard.experts)] if fused else []
    rows = [_joined([view[_with_first(index, run)] for index in ranges], dim) for run in experts or [None]]
    tensor = _joined(rows, 0)
    return torch.zeros_like(tensor) if part == "down_bias" and not shard.adds_down_bias else tensor


def _at(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(start, stop))


def _with_first(index: tuple[slice, ...], first: slice | None) -> tuple[slice, ...]:
    return index if first is None else (first, *index[1:])


def _joined(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges: 0 1 2 5 -> (0, 3), (5, 6)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
