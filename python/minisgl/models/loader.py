"""Weights from safetensors into their final place, one tensor at a time: no second copy of the model ever exists.

All headers are read first, so a missing or misshapen tensor is reported within milliseconds and not after minutes. Then
each tensor goes from the mapped file straight into the view of the parameter it belongs to (`Decoder.places`), converted
to the engine's dtype on the way, or to the expert store of its layer (`ExpertStore.sink`). Of several ranks each reads
only its slice of a tensor and only its experts.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from safetensors import SafetensorError, safe_open

from minisgl.layers.moe import MoELayer
from minisgl.layers.norm import RMSNorm
from minisgl.models.decoder import Decoder
from minisgl.models.family import TOP_NAMES
from minisgl.models.slices import read_expert, read_part
from minisgl.models.spec import ModelSpec
from minisgl.parallel import Shard

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}  # what is a plain weight; anything else means a quantized checkpoint
WORTH_A_LINE_S = 1.0


@dataclass(frozen=True)
class LoadReport:
    """What a load read from disk, and how long it took."""

    num_tensors: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        size, rate = self.num_bytes / 1e9, self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        return f"loaded {self.num_tensors} tensors, {size:.2f} GB in {self.seconds:.1f} s ({rate:.2f} GB/s)"


@dataclass(frozen=True)
class Header:
    """One tensor on disk: its file, name, shape and stored type (safetensors' name, e.g. "BF16")."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size * {"F64": 8, "F32": 4}.get(self.dtype, 2)


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: `place` is a name in `Decoder.places`, or else it is `part` of an expert of `layer`.

    expert None: the tensor holds all experts of the layer.
    """

    place: str | None = None
    layer: int = -1
    part: str = ""
    expert: int | None = None


class NameMap:
    """Checkpoint names of one model -> targets."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.layer_names, self.expert_names = spec.family.layer_names, spec.family.expert_names

    def target(self, name: str) -> Target | None:
        """None for a name that the family doesn't have."""
        if name in TOP_NAMES:
            return Target(TOP_NAMES[name])
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            return None
        layer, rest = int(match[1]), match[2]
        if rest in self.layer_names:
            return Target(f"layers.{layer}.{self.layer_names[rest]}")
        number = re.search(r"(?<=\.)\d+(?=\.)", rest)
        template = rest if number is None else f"{rest[: number.start()]}{{}}{rest[number.end() :]}"
        if template not in self.expert_names or not self.spec.is_sparse(layer):
            return None
        return Target(
            layer=layer, part=self.expert_names[template], expert=None if number is None else int(number[0])
        )

    def is_harmless(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor though nobody needs it: rotary tables of old exports, the head of a tied
        model, and the extra layers that only speculative decoding uses (MTP).
        """
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.spec.tie_embeddings):
            return True
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return match is not None and int(match[1]) >= self.spec.num_layers

    def checkpoint_name(self, place: str) -> str:
        """What a checkpoint of this family calls a place: for error messages."""
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", place)
        table = TOP_NAMES if layer is None else self.layer_names
        wanted = place if layer is None else layer[2]
        prefix = "" if layer is None else f"model.layers.{layer[1]}."
        return prefix + next((theirs for theirs, ours in table.items() if ours == wanted), wanted)


def load_weights(decoder: Decoder, folder: Path) -> LoadReport:
    """Fill `decoder` from the safetensors in `folder`.

    ValueError for a missing or misshapen tensor (its name, expected and found shape), a truncated or unreadable file (its
    name), a quantized checkpoint, or no safetensors at all. Unknown tensors are named in one warning and skipped.
    """
    if decoder.spec.quantization:
        raise ValueError(
            f"{folder}: weights quantized with {decoder.spec.quantization!r} are not served; use a plain checkpoint"
        )
    start = time.monotonic()
    places, shards = decoder.places(), decoder.shards()
    layers = decoder.moe_layers()
    work = _match(read_headers(folder), NameMap(decoder.spec), decoder, folder)
    total = sum(header.num_bytes for header, _ in work)
    by_file: dict[Path, list[tuple[Header, Target]]] = {}
    for header, target in work:
        by_file.setdefault(header.file, []).append((header, target))
    num_bytes = 0
    with _progress(total) as advance:
        for file, items in by_file.items():
            with _open(file) as tensors:
                for header, target in items:
                    num_bytes += _put(places, shards, layers, target, header, tensors)
                    advance(header.num_bytes)
    for layer, moe in layers.items():
        if gaps := moe.store.missing():
            raise ValueError(f"{folder}: layer {layer} lacks weights: {_some(gaps)}; fetch the model again")
    report = LoadReport(len(work), num_bytes, time.monotonic() - start)
    if report.seconds > WORTH_A_LINE_S:
        logger.info("%s", report)
    return report


def fill_dummy_weights(decoder: Decoder, seed: int = 0, std: float = 0.02) -> None:
    """Random weights on the decoder's device, for measuring without a checkpoint: norms 1, biases 0, all else normal."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, std, generator=generator)
    for layer, moe in decoder.moe_layers().items():
        moe.store.fill_random(seed + 1 + layer, std)


def read_headers(folder: Path) -> list[Header]:
    """Every tensor of a checkpoint, from file headers alone. An index says which file holds which tensor."""
    if (folder / INDEX).is_file():
        wanted = _read_index(folder)
    else:
        files = sorted(folder.glob("*.safetensors"))
        single = folder / "model.safetensors"
        # Some repositories add the same weights once more as consolidated*.safetensors, under other names.
        files = [single] if single in files else [f for f in files if not f.name.startswith("consolidated")]
        if not files:
            raise ValueError(f"{folder} holds no *.safetensors: convert the model, or give another folder")
        wanted = dict.fromkeys(files)
    headers = []
    for file, names in wanted.items():
        with _open(file) as tensors:
            present = list(tensors.keys())
            if names is not None and (absent := sorted(names - set(present))):
                raise ValueError(
                    f"{file} lacks {_some(absent)}, which {INDEX} says it holds; fetch the model again"
                )
            for name in present if names is None else sorted(names):
                view = tensors.get_slice(name)
                headers.append(Header(file, name, tuple(view.get_shape()), view.get_dtype()))
    return headers


def _read_index(folder: Path) -> dict[Path, set[str] | None]:
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged ({error}): fetch the model again") from error
    wanted: dict[Path, set[str] | None] = {folder / file: set() for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        names = wanted[folder / file]
        assert names is not None
        names.add(name)
    return wanted


def _match(
    headers: list[Header], names: NameMap, decoder: Decoder, folder: Path
) -> list[tuple[Header, Target]]:
    """Pair every tensor on disk with its target, and check shapes, types and completeness of everything but experts.

    Experts of other ranks are left out.
    """
    places, shards = decoder.places(), decoder.shards()
    layers = decoder.moe_layers()
    work: list[tuple[Header, Target]] = []
    unknown, seen = [], set()
    for header in headers:
        target = names.target(header.name)
        if target is None or (target.place is not None and target.place not in places):
            if not names.is_harmless(header.name):
                unknown.append(header.name)
            continue
        if header.dtype not in FLOATS:
            raise ValueError(
                f"{header.name} in {header.file} is stored as {header.dtype}; only {sorted(FLOATS)} are served"
            )
        if target.place is not None:
            expected = _checkpoint_shape(places[target.place], shards.get(target.place))
            if header.shape != expected:
                raise ValueError(
                    f"{header.name} in {header.file}: expected shape {list(expected)}, found {list(header.shape)}; "
                    "do config.json and weights belong together?"
                )
            seen.add(target.place)
        elif target.expert is not None and layers[target.layer].shard.is_elsewhere(target.expert):
            continue
        work.append((header, target))
    if absent := [f"{names.checkpoint_name(p)} {list(places[p].shape)}" for p in places if p not in seen]:
        raise ValueError(f"{folder} lacks {_some(absent)}; fetch the model again")
    if unknown:
        logger.warning("%s: ignored %d unknown tensors: %s", folder, len(unknown), _some(unknown))
    return work


def _checkpoint_shape(place: torch.Tensor, part: tuple[int, Shard] | None) -> tuple[int, ...]:
    """The shape that a tensor has on disk, of which `place` may be a part."""
    shape = list(place.shape)
    if part is not None:
        dim, shard = part
        shape[dim] = shard.total
    return tuple(shape)


def _put(
    places: Mapping[str, torch.Tensor],
    shards: Mapping[str, tuple[int, Shard]],
    layers: Mapping[int, MoELayer],
    target: Target,
    header: Header,
    tensors: Any,
) -> int:
    """Read what this rank needs of a tensor, and put it where it belongs. Returns the bytes read."""
    view = tensors.get_slice(header.name)
    if target.place is not None:
        place = places[target.place]
        if target.place in shards:
            dim, shard = shards[target.place]
            place, tensor = place.narrow(dim, 0, shard.length), read_part(view, dim, shard)
        else:
            tensor = tensors.get_tensor(header.name)
        place.copy_(tensor)
        return tensor.nbytes
    layer, expert = layers[target.layer], target.expert
    try:
        tensor = read_expert(view, target.part, expert is None, layer.shard)
        layer.store.sink(expert if expert is None else layer.shard.local(expert), target.part, tensor)
    except ValueError as error:
        raise ValueError(f"{header.name} in {header.file}: {error}") from error
    return tensor.nbytes


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """An open safetensors file whose every failure names the file."""
    if not file.is_file():
        raise ValueError(f"{file} is missing: fetch the model again")
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or damaged ({error}): fetch it again") from error


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar with GB/s on a terminal; yields advance(bytes)."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)


def _some(names: list[str], limit: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
