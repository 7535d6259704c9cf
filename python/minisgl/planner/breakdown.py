"""What a set-up's memory is made of, finer than the ledger's lines and with the same sum; and what a checkpoint has of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.engine.memory import Ledger, Setup, expert_cache_bytes
from minisgl.models.checkpoints import Header, read_headers
from minisgl.models.checkpoints.files import INDEX
from minisgl.models.sizes import PARTS, ModelSizes

SCALE_NAMES = ("scale", "zero", "g_idx")  # in the last word of a tensor's name: what quantization adds
PART_WORDS = (
    ("shared experts", ("shared_expert", "shared_mlp")),
    ("experts", (".experts.", "_exps.")),
    ("router", (".gate.", ".router.", "gate_inp", "e_score_correction_bias")),
    ("embedding", ("embed_tokens", "wte", "token_embd")),
    ("head", ("lm_head", "output.weight")),
    ("norms", ("layernorm", ".norm.")),
    ("attention", ("attn", "attention")),
    ("dense MLPs", ("mlp", "ffn")),
)
"""Parts of `PARTS` and "experts" by the words that tensors' names have, the first that fits."""


@dataclass(frozen=True)
class Piece:
    """Bytes of one part, in "device" or "host" memory. num_params: weights in it, 0 for what is not weights."""

    name: str
    num_bytes: int
    where: str
    num_params: int = 0


def breakdown(sizes: ModelSizes, setup: Setup, ledger: Ledger) -> list[Piece]:
    """The ledger's lines, with dense weights by part and experts as values and scales; zero bytes are left out."""
    pieces: list[Piece] = []
    for line in ledger.lines:
        if line.name == "dense weights":
            pieces += _dense_pieces(sizes, setup, line.num_bytes, line.where)
        elif line.name in ("experts", "experts on the host"):
            pieces += _expert_pieces(sizes, setup, line.name, line.num_bytes, line.where)
        else:
            pieces.append(Piece(line.name, line.num_bytes, line.where))
    return [piece for piece in pieces if piece.num_bytes]


def _dense_pieces(sizes: ModelSizes, setup: Setup, total: int, where: str) -> list[Piece]:
    """Parts in the model's dtype; where some are stored otherwise (fp8), what they differ by is the last piece."""
    counts = {name: sizes.params[name] for name in PARTS if sizes.params[name]}
    if setup.storage.embedding_on_host:
        counts.pop("embedding", None)
    item, wide = setup.dtype.itemsize, sizes.wide_params * (4 - setup.dtype.itemsize)
    pieces = [Piece(name, n * item + wide * (name == "router"), where, n) for name, n in counts.items()]
    rest = total - sum(piece.num_bytes for piece in pieces)
    return [*pieces, Piece("stored as fp8", rest, where)] if rest else pieces


def _expert_pieces(sizes: ModelSizes, setup: Setup, name: str, total: int, where: str) -> list[Piece]:
    record = sizes.record_bytes(setup.weight_format, setup.dtype, setup.group_size)
    values = value_bytes(sizes, setup.weight_format, setup.dtype)
    count = total // record
    return [
        Piece(name, values * count, where, sizes.params_per_expert * count),
        Piece(f"scales of {name}", (record - values) * count, where),
    ]


def value_bytes(sizes: ModelSizes, weight_format: str, dtype: torch.dtype) -> int:
    """Bytes of one expert's weights without scales, zero points and padding."""
    bits = {"none": 8 * dtype.itemsize, "int4": 4, "int4_asym": 4, "mxfp4": 4}.get(weight_format, 8)
    return sizes.params_per_expert * bits // 8


def format_bytes(
    sizes: ModelSizes, formats: Iterable[str], dtype: torch.dtype, group_size: int
) -> dict[str, int]:
    """Bytes of all experts with their scales, for every format that can store them."""
    out = {}
    for name in formats:
        try:
            record = sizes.record_bytes(name, dtype, group_size)
        except ValueError:  # such as a group size that does not divide the width
            continue
        if record:
            out[name] = record * sizes.num_experts * sizes.num_sparse
    return out


def cache_sizes(sizes: ModelSizes, setup: Setup) -> dict[int, int]:
    """Bytes of an expert cache by slots a layer: from one token's experts to all."""
    slots, out = sizes.top_k, {}
    while 0 < slots < sizes.num_experts:
        out[slots] = expert_cache_bytes(sizes, setup, slots)
        slots *= 2
    return out


def stored_bytes(folder: Path) -> dict[str, int] | None:
    """Exact bytes of a checkpoint by part, with "experts" and "scales", from its safetensors headers. Without weights in the
    folder the total that its index names, as "all"; None where neither is there.
    """
    if any(folder.glob("*.safetensors")) and not (folder / "minisgl.json").is_file():
        return dict(_by_part(read_headers(folder)))
    try:
        return {
            "all": int(json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"])
        }
    except (OSError, ValueError, KeyError, TypeError):  # no index, or one that doesn't say
        return None


def _by_part(headers: Iterable[Header]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for header in headers:
        part = part_of(header.name)
        found[part] = found.get(part, 0) + header.num_bytes
    return {name: found[name] for name in (*PARTS, "experts", "scales", "other") if name in found}


def part_of(name: str) -> str:
    """The part that a tensor of this name belongs to: one of `PARTS`, "experts", "scales" or "other"."""
    if any(word in name.rsplit(".", 1)[-1] for word in SCALE_NAMES):
        return "scales"
    return next((part for part, words in PART_WORDS if any(word in name for word in words)), "other")
