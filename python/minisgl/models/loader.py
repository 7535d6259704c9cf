"""From a checkpoint's tensors into their final place, one weight at a time: no second copy of the model ever exists.

All headers are read first, so a missing or misshapen tensor is reported within milliseconds and not after minutes. Then
threads read ahead, within a bound, and each weight goes straight into the view of the parameter it belongs to
(`Decoder.places`), converted to the engine's dtype on the way, or to the expert store of its layer, which quantizes it. Of
several ranks each reads only its slice of a plain tensor and only its experts. What encodings there are, `checkpoints/` knows.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

from minisgl.layers.fp8 import Fp8Weight, row_chunks
from minisgl.models.checkpoints.base import Pieces, Stored
from minisgl.models.checkpoints.converted import load_records
from minisgl.models.checkpoints.direct import Span, read_spans
from minisgl.models.checkpoints.files import DTYPES, Damaged, some
from minisgl.models.checkpoints.placing import Changes, put_dense, put_expert, read_dense, read_expert_weight
from minisgl.models.checkpoints.readahead import read_ahead
from minisgl.models.checkpoints.recognise import Checkpoint, open_checkpoint
from minisgl.models.decoder import Decoder
from minisgl.models.experts import expert_shape
from minisgl.models.family import TOP_NAMES
from minisgl.models.spec import ModelSpec
from minisgl.moe.formats.int4 import Int4Format
from minisgl.moe.store.shard import ExpertShard
from minisgl.parallel import Shard

logger = logging.getLogger(__name__)

FLOATS = {"F64", "F32", "F16", "BF16"}  # what is a plain weight; anything else means a quantized checkpoint
WORTH_A_LINE_S = 1.0
WORTH_CONVERTING_S = 20.0


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
    """Fill `decoder` from the checkpoint in `folder`.

    ValueError for a missing or misshapen tensor (its name, expected and found shape), a truncated or unreadable file (its
    name), an encoding that isn't served, or no weights at all. Unknown tensors are named in one warning and skipped.
    """
    start = time.monotonic()
    checkpoint, placer = open_checkpoint(folder), Placer(decoder)
    work, layers = match_weights(checkpoint, decoder), decoder.moe_layers()
    is_first = decoder.group.rank == 0
    records = checkpoint.manifest.total_bytes if checkpoint.manifest is not None else 0
    with _progress(sum(weight.num_bytes for weight, _ in work) + records, is_first) as advance:
        spans, others = placer.split(work)
        num_bytes = read_spans(spans, advance)
        for (weight, target), pieces in read_ahead(others, placer.read, lambda job: job[0].num_bytes):
            num_bytes += sum(piece.nbytes for piece in pieces.values())
            placer.put(weight, target, pieces)
            advance(weight.num_bytes)
        if checkpoint.manifest is not None:
            stores = {index: (layer.store, layer.shard) for index, layer in layers.items()}
            num_bytes += load_records(folder, checkpoint.manifest, stores, advance)
    for layer, moe in layers.items():
        if gaps := moe.store.missing():
            raise ValueError(f"{folder}: layer {layer} lacks weights: {some(gaps)}; fetch the model again")
    placer.changes.log(folder)
    report = LoadReport(len(work), num_bytes, time.monotonic() - start)
    if report.seconds > WORTH_A_LINE_S:
        logger.info("%s", report)
    if (hint := converting_hint(decoder, folder, report, placer.changes)) and is_first:
        logger.warning("%s", hint)  # a warning, because nobody sees less from a server's engine process
    return report


def converting_hint(decoder: Decoder, folder: Path, report: LoadReport, changes: Changes) -> str | None:
    """How the next start would be faster; None after a load that was quick, or that converting would not shorten."""
    moe = decoder.spec.moe
    if moe is None or report.seconds < WORTH_CONVERTING_S or not (changes.num_quantized or changes.reasons):
        return None
    experts = next(iter(decoder.moe_layers().values())).store.format
    name, group = experts.name, ""
    if isinstance(experts, Int4Format):
        name = "int4" if experts.symmetric else "int4_asym"
        group = f" --moe-quantization-group-size {experts.group_size}"
    record = experts.layout(expert_shape(decoder.spec)).nbytes
    size = record * moe.num_experts * len(moe.sparse_layers) + sum(decoder.num_bytes())
    return (
        f"{report}, and quantized experts on the way. `minisgl convert --model {folder} --moe-expert-quantization {name}"
        f"{group} --out DIR` does that once: later starts read {size / 1e9:.2f} GB and compute nothing"
    )


def fill_dummy_weights(decoder: Decoder, seed: int = 0, std: float = 0.02) -> None:
    """Random weights on the decoder's device, for measuring without a checkpoint: norms 1, biases 0, all else normal."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    places: dict[str, torch.Tensor | Fp8Weight] = {**decoder.places(), **decoder.fp8_weights()}
    for name, place in places.items():
        if isinstance(place, Fp8Weight):
            for start, stop in row_chunks(place.codes_NK):
                shape = (stop - start, place.codes_NK.shape[1])
                drawn_NK = torch.randn(shape, generator=generator, device=decoder.device)
                place.rows(start, stop).quantize(drawn_NK.mul_(std))
        elif "norm." in name:
            place.fill_(1.0)
        elif name.endswith("bias"):
            place.zero_()
        elif place.device == decoder.device:
            place.normal_(0.0, std, generator=generator)
        else:
            for start, stop in row_chunks(place):
                shape = (stop - start, place.shape[1])
                place[start:stop] = torch.randn(shape, generator=generator, device=decoder.device) * std
    for layer, moe in decoder.moe_layers().items():
        moe.store.fill_random(seed + 1 + layer, std)


Work = list[tuple[Stored, Target]]


def match_weights(checkpoint: Checkpoint, decoder: Decoder) -> Work:
    """Pair every weight on disk with its target, and check shapes, types and completeness of everything but experts.

    Experts of other ranks are left out, and each of the others is a job of its own. In the order of the disk.
    """
    folder, names = checkpoint.folder, NameMap(decoder.spec)
    places, shards = decoder.places(), decoder.shards()
    layers = decoder.moe_layers()
    tied = (
        decoder.spec.tie_embeddings and "lm_head.weight" in places
    )  # a copy of the embedding, stored in another way
    work: Work = []
    unknown, seen = [], set()
    for weight in checkpoint.weights:
        target = names.target(weight.name)
        surplus = tied and weight.name == "lm_head.weight"
        if target is None or surplus or (target.place is not None and target.place not in places):
            if not names.is_harmless(weight.name):
                unknown.append(weight.name)
            continue
        if weight.encoding is None and weight.first.dtype not in FLOATS:
            raise ValueError(
                f"{weight.name} in {weight.file} is stored as {weight.first.dtype}, and config.json names no quantization "
                f"that says what it means; plain weights are {', '.join(sorted(FLOATS))}"
            )
        if target.place is not None:
            expected = _checkpoint_shape(places[target.place], shards.get(target.place))
            if weight.shape != expected:
                raise ValueError(
                    f"{weight.name} in {weight.file}: expected shape {list(expected)}, found {list(weight.shape)}; "
                    "do config.json and weights belong together?"
                )
            seen.add(target.place)
            work.append((weight, target))
            if tied and target.place == "embedding.weight":
                seen.add("lm_head.weight")
                work.append((weight, Target("lm_head.weight")))
        else:
            work += _of_this_rank(weight, target, layers[target.layer].shard)
    if absent := [f"{names.checkpoint_name(p)} {list(places[p].shape)}" for p in places if p not in seen]:
        raise ValueError(f"{folder} lacks {some(absent)}; fetch the model again")
    if unknown:
        logger.warning("%s: ignored %d unknown tensors: %s", folder, len(unknown), some(unknown))
    return sorted(work, key=lambda item: (item[0].file, item[0].first.start))


def _of_this_rank(weight: Stored, target: Target, shard: ExpertShard) -> Work:
    """Nothing for another rank's expert; a weight that holds all experts as one an expert, so that they can stream."""
    if target.expert is not None:
        return [] if shard.is_elsewhere(target.expert) else [(weight, target)]
    if any(header.shape[:1] != (shard.num_experts,) for header in weight.pieces.values()):
        raise ValueError(
            f"{weight.name} in {weight.file}: expected a leading dim of {shard.num_experts} experts, found shape "
            f"{list(weight.shape)}"
        )
    return [(weight.of_expert(expert), replace(target, expert=expert)) for expert in shard.experts]


def _checkpoint_shape(place: torch.Tensor, part: tuple[int, Shard] | None) -> tuple[int, ...]:
    """The shape that a tensor has on disk, of which `place` may be a part."""
    shape = list(place.shape)
    if part is not None:
        dim, shard = part
        shape[dim] = shard.total
    return tuple(shape)


class Placer:
    """Reads and places the weights of one decoder. changes: what experts lost on the way."""

    def __init__(self, decoder: Decoder) -> None:
        self._places, self._shards, self._layers = decoder.places(), decoder.shards(), decoder.moe_layers()
        self._fp8, self._arrangement = decoder.fp8_weights(), decoder.spec.family.arrangement
        self.changes = Changes()

    def split(self, work: Work) -> tuple[list[Span], Work]:
        """(where the bytes of plain weights go as they are, those that are converted, cut or strided on the way)."""
        spans: list[Span] = []
        others: Work = []
        for weight, target in work:
            place = self._places[target.place] if target.place is not None else None
            part = self._shards.get(target.place or "")
            whole = part is None or part[1].length == part[1].total
            plain = (
                place is not None and weight.encoding is None and DTYPES[weight.first.dtype] == place.dtype
            )
            if place is not None and plain and whole and place.is_contiguous():
                header = weight.first
                spans.append(Span(header.file, header.start, place.view(-1).view(torch.uint8)))
            else:
                others.append((weight, target))
        return spans, others

    def read(self, job: tuple[Stored, Target]) -> Pieces:
        """This rank's part of a weight, as it is stored; in any thread. Experts are brought to where they are quantized."""
        weight, target = job
        if target.place is not None:
            return read_dense(weight, self._shards.get(target.place))
        layer = self._layers[target.layer]
        with naming(weight):
            pieces = read_expert_weight(weight, target.part, layer.shard, self._arrangement)
        return {role: piece.to(layer.store.device) for role, piece in pieces.items()}

    def put(self, weight: Stored, target: Target, pieces: Pieces) -> None:
        """What was read, where it belongs."""
        with naming(weight):
            if target.place is not None:
                place = self._fp8.get(target.place, self._places[target.place])
                put_dense(place, self._shards.get(target.place), weight, pieces)
            else:
                assert target.expert is not None
                layer, where = self._layers[target.layer], (target.part, target.expert)
                put_expert(layer.store, layer.shard, where, weight, pieces, self.changes)


@contextmanager
def naming(weight: Stored) -> Iterator[None]:
    """Errors name the weight and its file."""
    try:
        yield
    except Damaged:
        raise
    except ValueError as error:
        raise ValueError(f"{weight.name} in {weight.file}: {error}") from error


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Any]:
    """A bar with GB/s and the time that is left, on a terminal; yields advance(bytes)."""
    if not (is_shown and sys.stderr.isatty()):
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
