"""From a stored weight to where it finally lives: the part of it that this rank holds, in the bits it came with if possible.

`read` runs in any thread, `put` in one. A dense weight that is to be fp8 keeps the codes and scales of an fp8 file. Experts
whose encoding is none of our formats are dequantized and quantized anew; `Changes` keeps count, and measures on one expert of
every layer what that costs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minisgl.layers.fp8 import Fp8Weight
from minisgl.models.checkpoints.base import Encoding, Pieces, Stored
from minisgl.models.checkpoints.files import TensorView, read_tensor
from minisgl.models.checkpoints.fp8_block import Fp8Encoding
from minisgl.models.family import Arrangement
from minisgl.models.slices import MemoryView, read_expert, read_part
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.formats.native import NativeFormat
from minisgl.moe.store import ExpertStore
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.store.shard import Cut, ExpertShard
from minisgl.parallel import Shard

logger = logging.getLogger(__name__)


@dataclass
class Changes:
    """What did not keep its bits: reason -> weights, and the squared error and norm of those that were measured.

    num_quantized: plain weights that were quantized, as was asked.
    """

    num_quantized: int = 0
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    error: float = 0.0
    norm: float = 0.0

    def measure(self, weight: torch.Tensor, target: ExpertFormat) -> None:
        again = target.dequantize("down", target.quantize("down", weight))
        self.error += float((again - weight).square().sum())
        self.norm += float(weight.square().sum())

    def log(self, folder: Path) -> None:
        """One line a reason."""
        for (reason, target), count in self.reasons.items():
            cost = f"{(self.error / self.norm) ** 0.5:.2%} of the weights' norm" if self.norm else "unknown"
            logger.warning(
                "%s: %d expert weights were quantized anew as %s, because %s; relative error added: %s",
                folder,
                count,
                target,
                reason,
                cost,
            )


def read_dense(weight: Stored, part: tuple[int, Shard] | None) -> Pieces:
    """Pieces of a dense weight; of a plain one only this rank's part."""
    if weight.encoding is None and part is not None:
        return {"weight": read_part(TensorView(weight.first), *part)}
    return {role: read_tensor(header) for role, header in weight.pieces.items()}


def put_dense(
    place: torch.Tensor | Fp8Weight, part: tuple[int, Shard] | None, weight: Stored, pieces: Pieces
) -> None:
    """Write what `read_dense` gave into its place: dequantized if it was encoded, or as fp8 where the place holds codes."""
    device = place.codes_NK.device if isinstance(place, Fp8Weight) else place.device
    if weight.encoding is not None:
        pieces = {role: piece.to(device) for role, piece in pieces.items()}
    if isinstance(place, Fp8Weight):
        _put_fp8(place, part, weight, pieces)
        return
    tensor = _dense_values(part, weight, pieces)
    if part is not None:
        place = place.narrow(part[0], 0, part[1].length)
    place.copy_(tensor)


def _dense_values(part: tuple[int, Shard] | None, weight: Stored, pieces: Pieces) -> torch.Tensor:
    """This rank's part of what the pieces mean; a plain weight's was cut when it was read."""
    if weight.encoding is None:
        return pieces["weight"]
    tensor = weight.encoding.dequantize(pieces)
    return tensor if part is None else tensor.narrow(part[0], part[1].start, part[1].length)


def _put_fp8(place: Fp8Weight, part: tuple[int, Shard] | None, weight: Stored, pieces: Pieces) -> None:
    """The file's own codes and scales if it is fp8, else the weight quantized. ValueError where a rank's columns start inside
    of a group that shares a scale.
    """
    if part is not None and part[0] == 0:
        place = place.rows(0, part[1].length)
    if not isinstance(weight.encoding, Fp8Encoding):
        place.quantize(_dense_values(part, weight, pieces))
        return
    codes_NK, scale_NG, group = weight.encoding.grouped(pieces)
    if group and group != place.group:
        raise ValueError(
            f"its scales are of {group} columns each, where the model's attention has others: leave out --quantize-dense"
        )
    if part is not None:
        dim, shard = part
        codes_NK = codes_NK.narrow(dim, shard.start, shard.length)
        if dim == 0:
            scale_NG = scale_NG.narrow(0, shard.start, shard.length)
        elif group:
            if shard.start % group:
                raise ValueError(
                    f"--quantize-dense fp8 with --tp={shard.count}: a rank's part of its columns ends inside of {group} that "
                    "share a scale; use another --tp, or leave out --quantize-dense"
                )
            scale_NG = scale_NG.narrow(1, shard.start // group, place.scale_NG.shape[1])
    place.codes_NK.copy_(codes_NK)
    place.scale_NG.copy_(scale_NG.expand(place.scale_NG.shape))


def read_expert_weight(
    weight: Stored, part: str, shard: ExpertShard, arrangement: Arrangement | None = None
) -> Pieces:
    """Pieces of one expert's weight; of a plain one only this rank's part, arranged as the engine has it."""
    if weight.encoding is None:
        view: Any = TensorView(weight.first)
        if arrangement is not None:
            view = MemoryView(arrangement.undo(read_tensor(weight.first), part))
        return {"weight": read_expert(view, part, False, shard)}
    return {role: read_tensor(header) for role, header in weight.pieces.items()}


def put_expert(
    store: ExpertStore | ExpertRecords,
    shard: ExpertShard,
    target: tuple[str, int],
    weight: Stored,
    pieces: Pieces,
    changes: Changes,
) -> None:
    """Hand what `read_expert_weight` gave to a store. target: (part, global number of the expert)."""
    part, expert = target
    if weight.encoding is None:
        store.sink(shard.local(expert), part, pieces["weight"])
        changes.num_quantized += not isinstance(store.format, NativeFormat)
        return
    require_expert_shape(store, shard, part, weight.shape)
    _put_encoded(store, shard, target, weight.encoding, pieces, changes)


def require_expert_shape(
    store: ExpertStore | ExpertRecords, shard: ExpertShard, part: str, found: tuple[int, ...]
) -> None:
    """ValueError unless one expert's whole tensor `part` has the shape that config.json says."""
    rows, model = shard.hidden.total, store.shape.model_dim
    shapes = {"gate": (rows, model), "up": (rows, model), "gate_up": (2 * rows, model), "down": (model, rows)}
    if part in shapes and found != shapes[part]:
        raise ValueError(f"expected shape {list(shapes[part])}, found {list(found)}")


def _put_encoded(
    store: ExpertStore | ExpertRecords,
    shard: ExpertShard,
    target: tuple[str, int],
    encoding: Encoding,
    pieces: Pieces,
    changes: Changes,
) -> None:
    part, number = target
    cut, local = shard.cut(part), shard.local(number)
    parts = encoding.parts(pieces, store.format, part)
    if not isinstance(parts, str):
        parts = cut_parts(parts, cut)
    if not isinstance(parts, str):
        store.sink_parts(local, {f"{part}{suffix}": tensor for suffix, tensor in parts.items()})
        return
    value = encoding.dequantize(pieces, part)
    if not isinstance(store.format, NativeFormat):
        changes.reasons[parts, store.format.name] += 1
        if number == shard.experts[0]:
            changes.measure(value, store.format)
    store.sink(local, part, cut_weight(value, cut))


def cut_weight(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """The ranges of a cut side by side."""
    if cut is None:
        return tensor
    pieces = [tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)


def cut_parts(parts: Mapping[str, torch.Tensor], cut: Cut | None) -> dict[str, torch.Tensor] | str:
    """The same ranges of stored parts, where codes share bytes and scales share weights; or why they can't be cut there."""
    if cut is None:
        return dict(parts)
    out = {}
    for suffix, tensor in parts.items():
        if tensor.ndim <= cut.dim:
            out[suffix] = tensor  # a scale a row knows no columns
            continue
        size, ranges = tensor.shape[cut.dim], []
        for edges in cut.ranges:
            if any(edge * size % cut.total for edge in edges):
                return "a rank's part of the hidden dim ends inside of a block of weights that share a scale"
            ranges.append((edges[0] * size // cut.total, edges[1] * size // cut.total))
        out[suffix] = cut_weight(tensor, Cut(cut.dim, size, tuple(ranges)))
    return out
