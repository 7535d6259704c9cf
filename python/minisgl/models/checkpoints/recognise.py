"""From a checkpoint's folder to its weights: which encodings config.json announces, and which tensors belong to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.models.checkpoints.awq import AwqEncoding
from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Stored, collect
from minisgl.models.checkpoints.compressed_tensors import read_groups
from minisgl.models.checkpoints.converted import DENSE, DENSE_KEY, MANIFEST, METHOD, Manifest, read_manifest
from minisgl.models.checkpoints.files import file_headers, read_headers
from minisgl.models.checkpoints.fp8_block import Fp8Encoding
from minisgl.models.checkpoints.gguf import gguf_files, read_gguf
from minisgl.models.checkpoints.gptq import GptqEncoding
from minisgl.models.checkpoints.mxfp4 import Mxfp4Encoding
from minisgl.moe.base import ExpertShape

METHODS = ("fp8", "gptq", "awq", "compressed-tensors", "mxfp4")


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a folder. manifest: of a converted one, whose experts are records and no weights."""

    folder: Path
    weights: tuple[Stored, ...]
    manifest: Manifest | None = None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read every header of `folder`. ValueError for a damaged folder, or an encoding that isn't served."""
    manifest = read_manifest(folder)
    if manifest is None and is_gguf(folder):
        return Checkpoint(folder, tuple(read_gguf(folder)))
    headers = read_headers(folder) if manifest is None else file_headers(folder / DENSE)
    return Checkpoint(folder, tuple(collect(headers, dense_encodings(folder))), manifest)


def dense_encodings(folder: Path) -> tuple[Encoding, ...]:
    """What config.json says of all weights, or, of a converted model, of those that are no experts."""
    stored = read_quantization(folder)
    if stored is not None and stored.get("quant_method") == METHOD and (folder / MANIFEST).is_file():
        stored = stored.get(DENSE_KEY)
    return find_encodings(stored)


def is_gguf(folder: Path) -> bool:
    """Whether the weights of a folder are in GGUF files: safetensors go first."""
    return not any(folder.glob("*.safetensors")) and bool(gguf_files(folder))


def read_quantization(folder: Path) -> Mapping[str, Any] | None:
    """What config.json (or, beside older GPTQ models, quantize_config.json) says about quantization; None for plain weights."""
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored is None and (folder / "quantize_config.json").is_file():
        stored = {"quant_method": "gptq", **_read_json(folder / "quantize_config.json")}
    return stored


def find_encodings(config: Mapping[str, Any] | None) -> tuple[Encoding, ...]:
    """config: quantization_config. ValueError, naming what would work, for what isn't served."""
    if config is None:
        return ()
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return read_groups(config)
    if method == "gptq":
        return (GptqEncoding.from_config(config),)
    if method == "awq":
        return (AwqEncoding.from_config(config),)
    if method == "fp8":
        return (Fp8Encoding.from_config(config),)
    if method == "mxfp4":
        return (Mxfp4Encoding(),)
    if method == METHOD:
        raise ValueError(f"a converted model without its {MANIFEST}: convert it again")
    raise ValueError(
        f"weights quantized with {method!r} are not served: use {', '.join(METHODS)}, or plain ones"
    )


def stored_experts(folder: Path, shape: ExpertShape) -> ExpertChoice | None:
    """The format that keeps most experts of a checkpoint as they are; None where they are plain.

    Without weights in the folder config.json alone decides.
    """
    if (manifest := read_manifest(folder)) is not None:
        return manifest.choice
    if not is_gguf(folder):
        encodings = find_encodings(read_quantization(folder))
        if not encodings:
            return None
        if not any(folder.glob("*.safetensors")):
            return encodings[0].expert_choice(shape)
    weights = open_checkpoint(folder).weights
    experts = [w for w in weights if ".experts." in w.name and not w.name.endswith("bias")]
    if not experts:
        return None
    (encoding, _), *_ = Counter(weight.encoding for weight in experts).most_common(1)
    return None if encoding is None else encoding.expert_choice(shape)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the model again") from error
