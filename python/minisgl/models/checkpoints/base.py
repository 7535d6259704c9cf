"""How a published checkpoint stores one weight: its pieces on disk, and what they mean.

    Stored     one weight: what a plain checkpoint would call it, its plain shape, its pieces, and their encoding
    Encoding   pieces -> parts of one of our formats with every bit kept, or the reason why that cannot be;
               pieces -> the float32 weight, which is what the encoding *means*

Dense weights are dequantized while they load. Experts keep their bits wherever one of our formats says the same thing, and are
dequantized and quantized anew, with a line in the log, where none does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.models.checkpoints.files import Header
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat

Pieces = Mapping[str, torch.Tensor]
"""Role -> tensor as it lies on disk."""


@dataclass(frozen=True)
class ExpertChoice:
    """The format that a checkpoint's experts are stored in: a name for `get_format`, and the group size of int4."""

    name: str
    group_size: int = 128


class Encoding(ABC):
    """One way to store a weight in pieces. label: what users call it.

    pieces: role -> what follows the base name of a weight on disk. needed: roles without which a base name is no weight of this
    encoding. plain_suffix: base name + this = the name in a plain checkpoint.
    """

    label: str
    pieces: Mapping[str, str]
    needed: frozenset[str]
    plain_suffix: str = ""

    @abstractmethod
    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """[..., N, K] of the weight that pieces of these shapes hold. ValueError if they don't belong together."""

    @abstractmethod
    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        """Suffix ("", "_scale", "_zero") -> the weight as `target` stores it, bit for bit; or why that cannot be.

        part: what of an expert this is; a gate_up may have its halves in another order than we do.
        """

    @abstractmethod
    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        """The float32 weight [..., N, K] exactly as the encoding defines it. part: as for `parts`, "" for a dense weight."""

    @abstractmethod
    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        """The format of ours that keeps experts of this shape as they are, or else the nearest one."""


@dataclass(frozen=True)
class Stored:
    """One weight of a checkpoint. encoding: None for plain floats, whose only piece is called "weight"."""

    name: str
    shape: tuple[int, ...]
    pieces: Mapping[str, Header]
    encoding: Encoding | None = None

    @classmethod
    def plain(cls, header: Header) -> Stored:
        return cls(header.name, header.shape, {"weight": header})

    @property
    def file(self) -> Path:
        """The file of its first piece: for messages, and to read in the order of the disk."""
        return self.first.file

    @property
    def first(self) -> Header:
        return next(iter(self.pieces.values()))

    def of_expert(self, expert: int) -> Stored:
        """One expert's part of a weight that holds all of them, with a leading dim in every piece."""
        pieces = {role: header.row(expert) for role, header in self.pieces.items()}
        return Stored(self.name, self.shape[1:], pieces, self.encoding)

    @property
    def num_bytes(self) -> int:
        return sum(header.num_bytes for header in self.pieces.values())


def collect(headers: list[Header], encodings: tuple[Encoding, ...]) -> list[Stored]:
    """Group the tensors of a checkpoint into weights. Whatever belongs to no encoding is a plain weight.

    ValueError, with names, for pieces that don't belong together.
    """
    by_name = {header.name: header for header in headers}
    used: set[str] = set()
    weights = []
    for encoding in encodings:
        leading = min(encoding.needed, key=lambda role: -len(encoding.pieces[role]))
        for header in headers:
            base = header.name.removesuffix(encoding.pieces[leading])
            if header.name in used or base == header.name:
                continue
            found = {
                role: by_name[base + suffix]
                for role, suffix in encoding.pieces.items()
                if base + suffix in by_name and base + suffix not in used
            }
            if lacking := encoding.needed - found.keys():
                names = ", ".join(sorted(base + encoding.pieces[role] for role in lacking))
                raise ValueError(f"{header.name} in {header.file} lacks {names}; fetch the model again")
            try:
                shape = encoding.shape(found)
            except ValueError as error:
                raise ValueError(f"{base} in {header.file}: {error}") from error
            used.update(piece.name for piece in found.values())
            weights.append(Stored(base + encoding.plain_suffix, shape, found, encoding))
    return weights + [Stored.plain(header) for header in headers if header.name not in used]


def require_type(headers: Mapping[str, Header], role: str, *dtypes: str) -> Header:
    """The header of a role. ValueError if it is stored as something else."""
    header = headers[role]
    if header.dtype not in dtypes:
        raise ValueError(f"{role} is stored as {header.dtype}, expected {' or '.join(dtypes)}")
    return header


def require_shape(headers: Mapping[str, Header], role: str, *shapes: tuple[int, ...]) -> None:
    """ValueError if a role has none of these shapes."""
    if headers[role].shape not in shapes:
        raise ValueError(f"{role} has shape {list(headers[role].shape)}, expected {list(shapes[0])}")
