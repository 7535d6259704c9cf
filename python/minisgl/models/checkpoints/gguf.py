"""GGUF files, beside the config.json and tokenizer of the model they were made from.

The package `gguf` reads the header and knows what every block means; tensors are read like all others. Rows are blocks of
bytes: Q4_0 (32 codes, one fp16 scale) is our int4 in groups of 32 as it stands, MXFP4 our mxfp4, and F32, F16 and BF16 are
plain. What has finer scales or minima (Q4_K, Q6_K, Q8_0 …) is dequantized, and experts are quantized anew.

Names differ (`blk.0.attn_q`), the experts of a layer are one tensor, of which each gets its part, and files of the Llama
architecture hold the rows of q and k in another order (see `smollm2.unpermute_rope_rows`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Pieces, Stored
from minisgl.models.checkpoints.files import Damaged, Header
from minisgl.models.checkpoints.integers import Codes, integer_choice
from minisgl.models.smollm2 import LAYER_NAMES, TOP_NAMES, unpermute_rope_rows
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.formats.mxfp4 import Mxfp4Format, pack_codes

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # GGUF's name -> safetensors' name
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
LAYER_STEMS: Mapping[str, str] = {
    **LAYER_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT_STEMS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
NEEDLESS = ("rope_freqs.weight",)  # config.json says the same


@dataclass(frozen=True)
class GgufEncoding(Encoding):
    """Blocks of one type. kind: GGUF's name of it. num_heads: of a q or k whose rows are to be reordered, else 0."""

    kind: str
    block_size: int
    block_bytes: int
    num_heads: int = 0
    label: str = "GGUF"
    pieces: Mapping[str, str] = field(default_factory=lambda: {"codes": ""}, hash=False)
    needed: frozenset[str] = frozenset({"codes"})

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        *rows, num_bytes = headers["codes"].shape
        return (*rows, num_bytes // self.block_bytes * self.block_size)

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        if self.kind == "Q4_0":
            blocks = pieces["codes"].unflatten(-1, (-1, self.block_bytes))
            scale_NG = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
            return Codes(4, _nibbles(blocks[..., 2:]), scale_NG.float(), self.block_size).parts(target)
        if self.kind == "MXFP4" and isinstance(target, Mxfp4Format):
            blocks = pieces["codes"].unflatten(-1, (-1, self.block_bytes))
            return {"": pack_codes(_nibbles(blocks[..., 1:])), "_scale": blocks[..., 0].contiguous()}
        return f"GGUF's {self.kind} is not {target.name}"

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        codes = pieces["codes"]
        if self.kind in PLAIN:
            weight = codes.float()
        else:
            tool = _package()
            values = tool.dequantize(codes.cpu().numpy(), tool.GGMLQuantizationType[self.kind])
            weight = torch.from_numpy(values).to(codes.device)
        if not self.num_heads:
            return weight
        return unpermute_rope_rows(weight.view(len(weight), -1), self.num_heads).view(weight.shape)

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        if self.kind == "MXFP4":
            return ExpertChoice("mxfp4")
        if self.kind in FOUR_BITS:
            return integer_choice(4, 32, self.kind == "Q4_0", shape)
        return ExpertChoice("none" if self.kind in PLAIN else "int8")


def _nibbles(halves: torch.Tensor) -> torch.Tensor:
    """uint8 [..., blocks, 16] -> codes [..., blocks * 32]: low nibbles are the first half of a block."""
    return torch.cat((halves & 15, halves >> 4), dim=-1).flatten(-2)


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder, in order."""
    return sorted(folder.glob("*.gguf"))


def read_gguf(folder: Path) -> list[Stored]:
    """Every weight of the GGUF file in `folder`, or of its split parts, under the names of a plain checkpoint.

    ValueError for several models in one folder, a damaged file, a type that the package can't read, or without the package.
    """
    files = gguf_files(folder)
    models = {re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in files}
    if len(models) > 1:
        raise ValueError(
            f"{folder} holds {len(models)} GGUF models ({', '.join(sorted(models))}): leave one there"
        )
    heads: dict[str, int] = {}
    weights = []
    for file in files:
        reader = _open(file)
        heads = heads or _permuted_heads(reader)
        for tensor in reader.tensors:
            if tensor.name not in NEEDLESS:
                weights += _stored(file, tensor, heads)
    return weights


def _package() -> Any:
    try:
        return importlib.import_module("gguf")  # an optional package
    except ImportError as error:
        raise ValueError("GGUF files need the package gguf: pip install minisgl[gguf]") from error


def _open(file: Path) -> Any:
    try:
        return _package().GGUFReader(file)
    except ValueError as error:
        if isinstance(error.__cause__, ImportError):
            raise
        raise Damaged(file, error) from error
    except (OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise Damaged(file, error) from error


def _permuted_heads(reader: Any) -> dict[str, int]:
    """Stem -> heads, for the projections whose rows are in GGUF's own order."""
    fields = reader.fields
    if "general.architecture" not in fields or fields["general.architecture"].contents() != "llama":
        return {}
    num_heads = int(fields["llama.attention.head_count"].contents())
    kv = fields.get("llama.attention.head_count_kv")
    return {"attn_q": num_heads, "attn_k": num_heads if kv is None else int(kv.contents())}


def _stored(file: Path, tensor: Any, heads: Mapping[str, int]) -> Iterator[Stored]:
    """One weight, or one for each expert."""
    kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
    block_size, block_bytes = _package().GGML_QUANT_SIZES[tensor.tensor_type]
    if kind in PLAIN:
        header = Header(file, tensor.name, shape, PLAIN[kind], int(tensor.data_offset), int(tensor.n_bytes))
    else:
        rows = (*shape[:-1], shape[-1] // block_size * block_bytes)
        header = Header(file, tensor.name, rows, "U8", int(tensor.data_offset), int(tensor.n_bytes))
    if header.start + header.num_bytes > file.stat().st_size:
        raise Damaged(file, f"{tensor.name} ends behind the end of the file")
    name, stem, is_expert = _plain_name(tensor.name)
    num_heads = heads.get(stem, 0)
    encoding = None
    if kind not in PLAIN or num_heads:
        encoding = GgufEncoding(kind, block_size, block_bytes, num_heads)
    role = "weight" if encoding is None else "codes"
    whole = Stored(name, shape, {role: header}, encoding)
    if not is_expert:
        yield whole
        return
    for expert in range(shape[0]):
        yield replace(whole.of_expert(expert), name=name.format(expert))


def _plain_name(name: str) -> tuple[str, str, bool]:
    """(name in a plain checkpoint, stem, whether it stands for one tensor an expert with {} for its number)."""
    match = re.fullmatch(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)", name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        return (f"{TOP_NAMES[stem]}.{kind}" if stem in TOP_NAMES else name), stem, False
    layer, stem, kind = match.groups()
    base = f"model.layers.{layer}"
    if stem in EXPERT_STEMS and kind == "weight":
        return f"{base}.mlp.experts.{{}}.{EXPERT_STEMS[stem]}.weight", stem, True
    return (f"{base}.{LAYER_STEMS[stem]}.{kind}" if stem in LAYER_STEMS else name), stem, False
