"""The engine's own checkpoint: dense weights as they are, and the records of all experts as memory holds them.

    config.json, tokenizer …       as in the source; quantization_config says "minisgl" and the format
    dense.safetensors              every weight that is no expert
    experts-00007.safetensors      one uint8 tensor [E, nbytes]: the experts of layer 7, from a page boundary on
    minisgl.json                   the manifest: version, source, format, and size and sha256 of every file

A record is copied from the file straight into its slot or its place in host memory, by many threads, and nothing is computed.
VERSION rises when records change their meaning: a layout, a packing, a scale.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.models.checkpoints.base import ExpertChoice
from minisgl.models.checkpoints.files import Damaged, file_headers, read_into
from minisgl.models.checkpoints.placing import cut_parts
from minisgl.moe.base import ExpertShape, RecordLayout
from minisgl.moe.formats import get_format
from minisgl.moe.store import ExpertStore
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.store.shard import ExpertShard

MANIFEST, DENSE, METHOD = "minisgl.json", "dense.safetensors", "minisgl"
KIND, VERSION = "minisgl checkpoint", 1
CHUNK = 2**24  # bytes of one read
MAX_THREADS = 16


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
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
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


@dataclass(frozen=True)
class _Read:
    """One read: experts first..last of a layer's file, into the store's records from `local` on."""

    layer: int
    first: int
    last: int
    local: int


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
    starts = {layer: _check_layer(folder, manifest, layer, *stores[layer]) for layer in stores}
    reads = [
        read for layer, (_, shard) in stores.items() for read in _plan(layer, shard, manifest.record_bytes)
    ]

    def run(read: _Read) -> int:
        store, shard = stores[read.layer]
        assert isinstance(store, ExpertRecords)
        file = folder / manifest.layers[str(read.layer)]
        start = starts[read.layer] + read.first * manifest.record_bytes
        records_RB = store.records_EB[read.local : read.local + read.last - read.first]
        if shard.hidden.length == shard.hidden.total:
            _read_whole(file, start, records_RB)
            store.filled(read.local, read.local + len(records_RB))
        else:
            _read_cut(file, start, manifest, store, shard, read)
        num_bytes = (read.last - read.first) * manifest.record_bytes
        advance(num_bytes)
        return num_bytes

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="read") as pool:
        return sum(pool.map(run, reads))


def _plan(layer: int, shard: ExpertShard, record_bytes: int) -> Iterator[_Read]:
    """Reads of neighbouring experts, of about CHUNK bytes."""
    limit, first = max(1, CHUNK // record_bytes), 0
    for index in range(1, len(shard.experts) + 1):
        ends = index == len(shard.experts) or shard.experts[index] != shard.experts[index - 1] + 1
        if ends or index - first == limit:
            expert = shard.experts[first]
            yield _Read(layer, expert, expert + index - first, first)
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


def _read_whole(file: Path, start: int, records_RB: torch.Tensor) -> None:
    """Straight into host memory; to a device through a buffer that the copy engine can read."""
    if records_RB.device.type == "cpu":
        read_into(file, start, records_RB.view(-1))
        return
    buffer_B = torch.empty(records_RB.numel(), dtype=torch.uint8, pin_memory=records_RB.is_cuda)
    read_into(file, start, buffer_B)
    records_RB.view(-1).copy_(buffer_B)


def _read_cut(
    file: Path, start: int, manifest: Manifest, store: ExpertRecords, shard: ExpertShard, read: _Read
) -> None:
    """A rank's part of every record. ValueError where a part ends inside of a block of weights that share a scale."""
    whole = ExpertShape(store.shape.model_dim, shard.hidden.total, store.shape.bias)
    layout = get_format(manifest.expert_format, group_size=manifest.group_size).layout(whole)
    records_RB = torch.empty((read.last - read.first, manifest.record_bytes), dtype=torch.uint8)
    read_into(file, start, records_RB.view(-1))
    views = layout.views(records_RB)
    for index in range(len(records_RB)):
        for stem in ("gate_up", "down"):
            own = {n.removeprefix(stem): v[index] for n, v in views.items() if n.startswith(stem)}
            bias = own.pop("_bias", None)
            parts = cut_parts(own, shard.cut(stem))
            if isinstance(parts, str):
                raise ValueError(f"{file}: {parts}: use --expert-parallel-size, or convert to another format")
            if bias is not None:
                cut = cut_parts({"_bias": bias}, shard.cut(f"{stem}_bias"))
                assert not isinstance(cut, str)
                zero = stem == "down" and not shard.adds_down_bias
                parts |= {"_bias": torch.zeros_like(cut["_bias"]) if zero else cut["_bias"]}
            store.sink_parts(read.local + index, {f"{stem}{suffix}": part for suffix, part in parts.items()})
