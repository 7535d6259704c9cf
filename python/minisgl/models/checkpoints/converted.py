"""The engine's own checkpoint: dense weights as they are, and the records of all experts as memory holds them.

    config.json, tokenizer …       as in the source; quantization_config says "minisgl" and the format
    dense.safetensors              every weight that is no expert; fp8 as it came, as "dense" in quantization_config says
    experts-00007.safetensors      one uint8 tensor [E, nbytes]: the experts of layer 7, from a page boundary on
    minisgl.json                   the manifest: version, source, format, and size and sha256 of every file

A record is copied from the file straight into its slot or its place in host memory, by many threads, and nothing is computed.
VERSION rises when records change their meaning: a layout, a packing, a scale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.models.checkpoints.base import ExpertChoice
from minisgl.models.checkpoints.direct import CHUNK, Span, new_pool, read_spans
from minisgl.models.checkpoints.files import Damaged, file_headers, read_into
from minisgl.models.checkpoints.placing import cut_parts, cut_weight
from minisgl.moe.base import ExpertShape, RecordLayout
from minisgl.moe.formats import get_format
from minisgl.moe.store import ExpertStore
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.store.shard import ExpertShard

MANIFEST, DENSE, METHOD = "minisgl.json", "dense.safetensors", "minisgl"
DENSE_KEY = "dense"  # of quantization_config: what the source's own says, for fp8 weights that are no experts
KIND, VERSION = "minisgl checkpoint", 2


@dataclass(frozen=True)
class FileSum:
    """Size and sha256 of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint is. source: the fingerprint of what it was made from. expert_format, group_size: see
    `get_format`. layers: layer -> file of its experts' records. parts: the layout of a record, to tell when it has changed.
    """

    source: str
    expert_format: str
    group_size: int
    num_experts: int
    record_bytes: int
    parts: list[list[Any]]
    layers: dict[str, str]
    files: dict[str, FileSum]
    kind: str = KIND
    version: int = VERSION

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return len(self.layers) * self.num_experts * self.record_bytes

    @property
    def choice(self) -> ExpertChoice:
        return ExpertChoice(self.expert_format, self.group_size)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted checkpoint, None for any other folder.

    ValueError, naming the file, for a damaged manifest, another version, and a file that is missing or has another size.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    again = "convert the model again"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        kind, version = table["kind"], table["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): {again}") from error
    if kind != KIND or version != VERSION:
        raise ValueError(f"{path} says {kind!r} version {version}, this is version {VERSION}: {again}")
    try:
        files = {name: FileSum(**entry) for name, entry in table["files"].items()}
        manifest = Manifest(**{**table, "files": files})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): {again}") from error
    for name, entry in files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.num_bytes:
            found = "is missing" if size is None else f"has {size} bytes, not {entry.num_bytes}"
            raise ValueError(f"{folder / name} {found}: {again}")
    return manifest


def check_sums(folder: Path, manifest: Manifest) -> list[str]:
    """Names of files whose bytes are not those that were written. Reads all of them, in threads."""
    with new_pool() as pool:
        sums = pool.map(lambda name: file_sum(folder / name), manifest.files)
        return [name for name, found in zip(manifest.files, sums) if found != manifest.files[name]]


def file_sum(path: Path) -> FileSum:
    """Size and checksum of a file as it is now."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK):
            digest.update(piece)
        return FileSum(stream.tell(), digest.hexdigest())


def records_name(layer: int) -> str:
    """Name of the tensor that holds a layer's records."""
    return f"layers.{layer}.experts"


def layout_table(layout: RecordLayout) -> list[list[Any]]:
    """A record's layout as the manifest has it."""
    return [[p.name, list(p.shape), str(p.dtype).removeprefix("torch."), p.offset] for p in layout.parts]


def load_records(
    folder: Path,
    manifest: Manifest,
    stores: Mapping[int, tuple[ExpertStore, ExpertShard]],
    advance: Callable[[int], object],
) -> int:
    """Read every expert that the stores hold. stores: layer -> (store, what of the model's experts it holds).

    advance: told the bytes of every read, from any thread. Returns the bytes read. ValueError where the records are not those
    that a store expects.
    """
    spans, cut, num_bytes = [], [], 0
    for layer, (store, shard) in stores.items():
        assert isinstance(store, ExpertRecords)
        start = _check_layer(folder, manifest, layer, store, shard)
        file, size = folder / manifest.layers[str(layer)], manifest.record_bytes
        for local, (first, last) in _runs(shard.experts):
            if shard.hidden.length == shard.hidden.total:
                records_RB = store.records_EB[local : local + last - first]
                spans.append(Span(file, start + first * size, records_RB.view(-1)))
                store.filled(local, local + last - first)
            else:
                cut += [
                    (store, shard, local + i, file, start + (first + i) * size) for i in range(last - first)
                ]

    def read_cut(job: tuple[ExpertRecords, ExpertShard, int, Path, int]) -> int:
        _read_cut(manifest, *job)
        advance(manifest.record_bytes)
        return manifest.record_bytes

    num_bytes = read_spans(spans, advance)
    with new_pool() as pool:
        return num_bytes + sum(pool.map(read_cut, cut))


def _runs(experts: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(place of its first, (first, last + 1)) of every run of neighbours: 0 1 5 -> (0, (0, 2)), (2, (5, 6))."""
    first = 0
    for index in range(1, len(experts) + 1):
        if index == len(experts) or experts[index] != experts[index - 1] + 1:
            yield first, (experts[first], experts[first] + index - first)
            first = index


def _check_layer(folder: Path, manifest: Manifest, layer: int, store: ExpertStore, shard: ExpertShard) -> int:
    """Where a layer's records start in their file. ValueError unless they are what the store expects."""
    whole = ExpertShape(store.shape.model_dim, shard.hidden.total, store.shape.bias)
    stored = get_format(manifest.expert_format, group_size=manifest.group_size)
    layout = stored.layout(whole)
    if store.format.name != stored.name or store.format.layout(store.shape) != stored.layout(store.shape):
        raise ValueError(
            f"{folder} holds experts as {manifest.expert_format} with groups of {manifest.group_size}: leave out "
            f"--moe-expert-quantization, or convert the original again as {store.format.name}"
        )
    if manifest.num_experts != shard.num_experts or layout_table(layout) != manifest.parts:
        raise ValueError(
            f"{folder / MANIFEST} describes other records than config.json: convert the model again"
        )
    name = manifest.layers.get(str(layer))
    if name is None:
        raise ValueError(f"{folder / MANIFEST} names no experts of layer {layer}: convert the model again")
    headers = {header.name: header for header in file_headers(folder / name)}
    found, expected = headers.get(records_name(layer)), (manifest.num_experts, manifest.record_bytes)
    if found is None or (found.shape, found.dtype) != (expected, "U8"):
        raise Damaged(folder / name, f"it has no records of shape {list(expected)}")
    return found.start


def _read_cut(
    manifest: Manifest, store: ExpertRecords, shard: ExpertShard, local: int, file: Path, start: int
) -> None:
    """A rank's part of one record. ValueError where a part ends inside of a block of weights that share a scale."""
    whole = ExpertShape(store.shape.model_dim, shard.hidden.total, store.shape.bias)
    layout = get_format(manifest.expert_format, group_size=manifest.group_size).layout(whole)
    record_1B = torch.empty((1, manifest.record_bytes), dtype=torch.uint8)
    read_into(file, start, record_1B.view(-1))
    views = {name: view[0] for name, view in layout.views(record_1B).items()}
    for stem in ("gate_up", "down"):
        own = {name.removeprefix(stem): view for name, view in views.items() if name.startswith(stem)}
        bias = own.pop("_bias", None)
        parts = cut_parts(own, shard.cut(stem))
        if isinstance(parts, str):
            raise ValueError(f"{file}: {parts}: use --expert-parallel-size, or convert to another format")
        if bias is not None:
            bias = cut_weight(bias, shard.cut(f"{stem}_bias"))
            parts["_bias"] = torch.zeros_like(bias) if stem == "down" and not shard.adds_down_bias else bias
        store.sink_parts(local, {f"{stem}{suffix}": part for suffix, part in parts.items()})
