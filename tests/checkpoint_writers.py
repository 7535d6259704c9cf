"""Quantizes a tiny plain checkpoint in place, as the tools of each ecosystem do, and returns what its weights mean.

GPTQ and AWQ have no light writer: their packing is written here from the documented layouts, number by number, so that it
shares no line with the reader. fp8 and mxfp4 use transformers' own functions, compressed-tensors its own package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

Tensors = dict[str, torch.Tensor]
Encode = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""(base name, weight [N, K]) -> (tensors on disk, the float32 weight that they mean)."""

SINGLE = "model.safetensors"


def quantize_folder(
    folder: Path,
    encode: Encode,
    config: Mapping[str, Any],
    choose: Callable[[str], bool] = lambda name: True,
) -> Tensors:
    """Rewrite SINGLE and config.json. choose: which projections are quantized. Returns the plain tensors that it now means."""
    plain = load_file(folder / SINGLE)
    stored: Tensors = {}
    for name, tensor in list(plain.items()):
        if not re.search(r"(_proj|\.w[123])\.weight$", name) or not choose(name):
            stored[name] = tensor
            continue
        pieces, meant = encode(name.removesuffix(".weight"), tensor.float())
        stored |= {key: piece.contiguous() for key, piece in pieces.items()}
        plain[name] = meant
    save_file(stored, folder / SINGLE)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(config)}))
    return plain


def encode_fp8(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 128 x 128 by transformers, the weight padded to whole blocks while it is quantized, as released models were."""
    tool = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    )
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
    pieces = Fp8Quantize(tool)._quantize_one(f"{base}.weight", padded)
    codes, scale = pieces[f"{base}.weight"], pieces[f"{base}.weight_scale_inv"]
    meant = Fp8Dequantize(tool)._dequantize_one(codes, scale, torch.float32)[:rows, :cols]
    return {f"{base}.weight": codes[:rows, :cols], f"{base}.weight_scale_inv": scale}, meant.contiguous()


def round_to_groups(
    weight: torch.Tensor, group_of_K: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """(codes [N, K], zeros [N, G], fp16 scales [N, G], meant weight) of integer quantization, one group after the other."""
    values, largest, middle = weight.numpy(), (1 << bits) - 1, 1 << (bits - 1)
    num_groups = int(group_of_K.max()) + 1
    codes = np.zeros(values.shape, dtype=np.int64)
    scales = np.zeros((len(values), num_groups), dtype=np.float16)
    zeros = np.full((len(values), num_groups), middle, dtype=np.int64)
    for group in range(num_groups):
        mine = group_of_K == group
        low = np.minimum(values[:, mine].min(axis=1), 0)
        high = np.maximum(values[:, mine].max(axis=1), 0)
        span = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, group] = (span / largest).astype(np.float16)
        scale = scales[:, group].astype(np.float32)[:, None]
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-low / scale[:, 0]), 1, largest)
        codes[:, mine] = np.clip(np.rint(values[:, mine] / scale) + zeros[:, group : group + 1], 0, largest)
    meant = (codes - zeros[:, group_of_K]).astype(np.float32) * scales.astype(np.float32)[:, group_of_K]
    return codes, zeros, scales, torch.from_numpy(meant)


def pack_rows(matrix: np.ndarray, bits: int) -> torch.Tensor:
    """[R, C] -> int32 [R * bits / 32, C]: row (32 / bits) r + i goes into bits i * bits of word r."""
    per_word = 32 // bits
    words = np.zeros((-(-len(matrix) // per_word), matrix.shape[1]), dtype=np.uint64)
    for row, values in enumerate(matrix):
        words[row // per_word] |= values.astype(np.uint64) << np.uint64(bits * (row % per_word))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq_encoder(
    group_size: int, *, bits: int = 4, symmetric: bool = True, version: str = "gptq", act_order: bool = False
) -> Encode:
    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        cols = weight.shape[1]
        group_of_K = np.arange(cols) // (cols if group_size < 1 else group_size)
        if act_order:
            group_of_K = np.random.default_rng(len(base)).permutation(group_of_K)
        codes, zeros, scales, meant = round_to_groups(weight, group_of_K, bits, symmetric)
        stored_zeros = zeros - (version == "gptq")
        pieces = {
            f"{base}.qweight": pack_rows(codes.T, bits),
            f"{base}.qzeros": pack_rows(stored_zeros, bits).T,
            f"{base}.scales": torch.from_numpy(scales.T.copy()),
            f"{base}.g_idx": torch.from_numpy(group_of_K.astype(np.int32)),
        }
        return pieces, meant

    return encode


def gptq_config(
    group_size: int, *, bits: int = 4, symmetric: bool = True, version: str = "gptq", act_order: bool = False
) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric}
    return {**config, "desc_act": act_order, "checkpoint_format": version}


def awq_encoder(group_size: int) -> Encode:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(matrix: np.ndarray) -> torch.Tensor:
        words = np.zeros((len(matrix), matrix.shape[1] // 8), dtype=np.uint64)
        for word in range(words.shape[1]):
            for nibble in range(8):
                column = matrix[:, 8 * word + order[nibble]].astype(np.uint64)
                words[:, word] |= column << np.uint64(4 * nibble)
        return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())

    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of_K = np.arange(weight.shape[1]) // group_size
        codes, zeros, scales, meant = round_to_groups(weight, group_of_K, 4, symmetric=False)
        pieces = {
            f"{base}.qweight": pack(codes.T),
            f"{base}.qzeros": pack(zeros.T),
            f"{base}.scales": torch.from_numpy(scales.T.copy()),
        }
        return pieces, meant

    return encode


def awq_config(group_size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}


def compressed_encoder(layout: str, weights: dict[str, Any]) -> tuple[Encode, dict[str, Any]]:
    """(encoder, quantization_config) of compressed-tensors' own package. weights: its QuantizationArgs."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        if args.strategy == "block":
            rows, cols = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows))
            blocks = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
            low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
        else:
            low, high = groups.amin(-1), groups.amax(-1)
        scale, zero = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        meant = compressor.decompress(packed, scheme)["weight"]
        return {f"{base}.{key}": tensor for key, tensor in packed.items()}, meant.float()

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": layout}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return encode, config
