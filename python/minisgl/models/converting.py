"""Writing the engine's own checkpoint (`checkpoints.converted`), one layer of experts at a time.

Everything goes into a folder beside the target, which gets its name when all of it is on the disk: whoever finds the folder
finds it whole. The host holds one layer's records and what is read ahead, whatever the model's size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from minisgl.attention import make_attention
from minisgl.models.checkpoints.base import ExpertChoice, Pieces, Stored
from minisgl.models.checkpoints.converted import (
    DENSE,
    DENSE_KEY,
    MANIFEST,
    METHOD,
    FileSum,
    Manifest,
    layout_table,
    read_manifest,
    records_name,
)
from minisgl.models.checkpoints.files import DTYPES, some
from minisgl.models.checkpoints.fp8_block import Fp8Encoding
from minisgl.models.checkpoints.placing import Changes, put_expert, read_dense, read_expert_weight
from minisgl.models.checkpoints.readahead import read_ahead
from minisgl.models.checkpoints.recognise import Checkpoint, open_checkpoint, read_quantization
from minisgl.models.decoder import Decoder
from minisgl.models.experts import expert_shape, resident_moe
from minisgl.models.loader import Target, match_weights, naming
from minisgl.models.spec import ModelSpec
from minisgl.moe.formats import get_format
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.store.shard import ExpertShard

logger = logging.getLogger(__name__)

DATA_ALIGNMENT = 4096  # of the tensors in a file, so that reads need not be split at pages
NAMES = {dtype: name for name, dtype in DTYPES.items()}
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
LEFT_OUT = ("config.json", "quantize_config.json", MANIFEST)
Job = tuple[Stored, Target]


@dataclass(frozen=True)
class Plan:
    """What will be written. out: the finished folder. device: where weights are quantized."""

    checkpoint: Checkpoint
    spec: ModelSpec
    choice: ExpertChoice
    out: Path
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Of the records; what the rest takes is small beside them."""
        assert self.spec.moe is not None
        layout = get_format(self.choice.name, group_size=self.choice.group_size).layout(
            expert_shape(self.spec)
        )
        return layout.nbytes * self.spec.moe.num_experts * len(self.spec.moe.sparse_layers)


def convert(
    folder: Path,
    out: Path,
    choice: ExpertChoice,
    device: torch.device,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> Manifest:
    """Write the model in `folder` as the engine's own checkpoint `out`, which must not exist, with experts as `choice` says.

    advance: told the bytes of the source as they are done. ValueError with the remedy for a model without experts, a format
    that can't store them, a damaged source, and a full disk, on which nothing is left.
    """
    spec = ModelSpec.from_folder(folder)
    if spec.moe is None:
        raise ValueError(
            f"{folder}: {spec.architecture} has no experts, and a plain checkpoint is read as fast"
        )
    if choice.name == "none":
        raise ValueError("plain experts are read as fast as converted ones: name a --moe-expert-quantization")
    if read_manifest(folder) is not None:
        raise ValueError(f"{folder} is converted already: give the original model")
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or give another --out")
    plan = Plan(open_checkpoint(folder), spec, choice, out, device)
    free = shutil.disk_usage(next(path for path in out.absolute().parents if path.exists())).free
    if free < plan.num_bytes:
        raise ValueError(
            f"{out.parent} has {free / 1e9:.1f} GB free, the experts take {plan.num_bytes / 1e9:.1f}: free some"
        )
    with _whole_or_nothing(out) as folder_:
        return _write(plan, folder_, advance)


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """A folder that gets its name at the end, or disappears."""
    staging = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        yield staging
        staging.chmod(0o755)
        staging.rename(out)
    except OSError as error:
        raise ValueError(
            f"{out} can't be written ({error.strerror}): nothing is left of it; free some space, or give "
            "another --out"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _write(plan: Plan, folder: Path, advance: Callable[[int], object]) -> Manifest:
    decoder = _empty_decoder(plan.spec)
    work = match_weights(plan.checkpoint, decoder)
    dense = [weight for weight, target in work if target.place is not None]
    experts = sorted(
        (job for job in work if job[1].place is None), key=lambda job: job[1].layer
    )  # stable: disk order within
    files = {DENSE: _write_dense(folder / DENSE, dense, plan.spec.dtype, advance)}
    layers, changes = {}, Changes()
    for layer, records_EB in _quantized_layers(plan, experts, changes, advance):
        name = f"experts-{layer:05d}.safetensors"
        tensor = records_name(layer)
        files[name] = _write_file(folder / name, [(tensor, records_EB)], {tensor: records_EB.shape})
        layers[str(layer)] = name
    changes.log(plan.checkpoint.folder)
    files |= _copy_texts(plan, folder)
    moe, weight_format = plan.spec.moe, get_format(plan.choice.name, group_size=plan.choice.group_size)
    assert moe is not None
    layout = weight_format.layout(expert_shape(plan.spec))
    manifest = Manifest(
        source=fingerprint(plan.checkpoint),
        expert_format=plan.choice.name,
        group_size=plan.choice.group_size,
        num_experts=moe.num_experts,
        record_bytes=layout.nbytes,
        parts=layout_table(layout),
        layers=layers,
        files=files,
    )
    manifest.save(folder / MANIFEST)
    return manifest


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over config.json and every tensor's file, place, shape and type: tells sources apart without reading weights."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for piece in sorted(
        (piece for weight in checkpoint.weights for piece in weight.pieces.values()),
        key=lambda piece: (piece.file, piece.start),
    ):
        digest.update(repr((piece.file.name, piece.name, piece.start, piece.shape, piece.dtype)).encode())
    return digest.hexdigest()


def _empty_decoder(spec: ModelSpec) -> Decoder:
    """Shapes only, to match names with."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    moe_factory = resident_moe(spec, backend="torch", device=meta, dtype=spec.dtype)
    return Decoder(
        spec,
        lambda problem: make_attention("sdpa", problem, cpu),
        page_size=16,
        device=meta,
        dtype=spec.dtype,
        moe_factory=moe_factory,
    )


def _quantized_layers(
    plan: Plan, experts: list[Job], changes: Changes, advance: Callable[[int], object]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(layer, its records, which the next layer overwrites)."""
    moe, shape = plan.spec.moe, expert_shape(plan.spec)
    assert moe is not None
    shard = ExpertShard.whole(moe.num_experts, moe.hidden_dim)
    weight_format = get_format(plan.choice.name, plan.spec.dtype, plan.choice.group_size)
    memory_EB = torch.zeros((moe.num_experts, weight_format.layout(shape).nbytes), dtype=torch.uint8)

    def read(job: Job) -> Pieces:
        weight, target = job
        with naming(weight):
            pieces = read_expert_weight(weight, target.part, shard, plan.spec.family.arrangement)
        return {role: piece.to(plan.device) for role, piece in pieces.items()}

    done = []
    ahead = read_ahead(experts, read, lambda job: job[0].num_bytes)
    for layer, group in itertools.groupby(ahead, key=lambda item: item[0][1].layer):
        records = ExpertRecords(moe.num_experts, shape, weight_format, plan.device, memory_EB)
        for (weight, target), pieces in group:
            assert target.expert is not None
            with naming(weight):
                put_expert(records, shard, (target.part, target.expert), weight, pieces, changes)
            advance(weight.num_bytes)
        if gaps := records.missing():
            raise ValueError(
                f"{plan.checkpoint.folder}: layer {layer} lacks weights: {some(gaps)}; fetch the model again"
            )
        done.append(layer)
        yield layer, memory_EB
    if absent := sorted(moe.sparse_layers - set(done)):
        raise ValueError(f"{plan.checkpoint.folder}: no experts of layer {absent[0]}; fetch the model again")


def _write_dense(
    path: Path, weights: list[Stored], dtype: torch.dtype, advance: Callable[[int], object]
) -> FileSum:
    """Plain weights and fp8 ones as they are, other encodings in the model's dtype."""
    table = {name: entry for weight in weights for name, entry in _dense_entries(weight, dtype).items()}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for weight, pieces in read_ahead(weights, lambda w: read_dense(w, None), lambda w: w.num_bytes):
            if weight.encoding is None or keeps_pieces(weight):
                yield from zip(_dense_entries(weight, dtype), pieces.values())
            else:
                yield weight.name, weight.encoding.dequantize(pieces).to(dtype)
            advance(weight.num_bytes)

    shapes = {name: shape for name, (shape, _) in table.items()}
    return _write_file(path, tensors(), shapes, {name: stored for name, (_, stored) in table.items()})


def _dense_entries(weight: Stored, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, type) of the tensors that a dense weight is written as."""
    if weight.encoding is None:
        return {weight.name: (weight.shape, DTYPES[weight.first.dtype])}
    if keeps_pieces(weight):
        return {piece.name: (piece.shape, DTYPES[piece.dtype]) for piece in weight.pieces.values()}
    return {weight.name: (weight.shape, dtype)}


def keeps_pieces(weight: Stored) -> bool:
    """Whether an encoded dense weight is written as it lies in the source: fp8, whose layers may stay so."""
    return isinstance(weight.encoding, Fp8Encoding)


def _write_file(
    path: Path, tensors: Any, shapes: dict[str, Any], types: dict[str, torch.dtype] | None = None
) -> FileSum:
    """A safetensors file, tensor by tensor in the order of shapes; types: uint8 where there are none."""
    table, offset = {}, 0
    for name, shape in shapes.items():
        dtype = types[name] if types is not None else torch.uint8
        size = math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(table).encode()
    header += b" " * (-(8 + len(header)) % DATA_ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        _append(stream, digest, len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            assert list(tensor.shape) == table[name]["shape"]
            _append(stream, digest, tensor.contiguous().view(-1).view(torch.uint8).numpy())
        size = stream.tell()
        stream.flush()
        os.fsync(stream.fileno())
    return FileSum(size, digest.hexdigest())


def _append(stream: BinaryIO, digest: Any, data: Any) -> None:
    stream.write(data)
    digest.update(data)


def _copy_texts(plan: Plan, target: Path) -> dict[str, FileSum]:
    """Configuration, with what the experts are now, and everything about text."""
    source = plan.checkpoint.folder
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("compression_config", None)
    now: dict[str, Any] = {
        "quant_method": METHOD,
        "format": plan.choice.name,
        "group_size": plan.choice.group_size,
    }
    if any(keeps_pieces(weight) and ".experts." not in weight.name for weight in plan.checkpoint.weights):
        now[DENSE_KEY] = read_quantization(source)
    config["quantization_config"] = now
    texts = {"config.json": json.dumps(config, indent=2).encode() + b"\n"}
    for path in sorted(path for pattern in COPIED for path in source.glob(pattern)):
        if path.name not in LEFT_OUT and not path.name.endswith(".safetensors.index.json"):
            texts[path.name] = path.read_bytes()
    for name, data in texts.items():
        (target / name).write_bytes(data)
    return {name: FileSum(len(data), hashlib.sha256(data).hexdigest()) for name, data in texts.items()}
