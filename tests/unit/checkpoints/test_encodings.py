"""Every encoding means what its own ecosystem says, and reaches our formats without a bit changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.models.checkpoints.base import collect
from minisgl.models.checkpoints.files import read_headers, read_tensor
from minisgl.models.checkpoints.recognise import find_encodings
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import get_format
from tests.checkpoint_writers import (
    awq_config,
    awq_encoder,
    compressed_encoder,
    encode_fp8,
    gptq_config,
    gptq_encoder,
)

ROWS, COLS = 96, 128
GROUP = {"strategy": "group", "group_size": 32}


def compressed(layout, **weights):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    return compressed_encoder(layout, weights)


CASES = {
    "fp8_block": (
        lambda: (encode_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "fp8_block",
    ),
    "gptq": (lambda: (gptq_encoder(32), gptq_config(32)), "int4"),
    "gptq_v2": (lambda: (gptq_encoder(32, version="gptq_v2"), gptq_config(32, version="gptq_v2")), "int4"),
    "gptq_asym": (lambda: (gptq_encoder(64, symmetric=False), gptq_config(64, symmetric=False)), "int4_asym"),
    "gptq_rows": (lambda: (gptq_encoder(-1), gptq_config(-1)), "int4"),
    "gptq_8_rows": (lambda: (gptq_encoder(-1, bits=8), gptq_config(-1, bits=8)), "int8"),
    "awq": (lambda: (awq_encoder(32), awq_config(32)), "int4_asym"),
    "ct_int4": (lambda: compressed("pack-quantized", num_bits=4, **GROUP), "int4"),
    "ct_int4_asym": (
        lambda: compressed("pack-quantized", num_bits=4, symmetric=False, **GROUP),
        "int4_asym",
    ),
    "ct_int8": (lambda: compressed("int-quantized", num_bits=8, strategy="channel"), "int8"),
    "ct_int8_packed": (lambda: compressed("pack-quantized", num_bits=8, strategy="channel"), "int8"),
    "ct_fp8": (lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "fp8"),
    "ct_fp8_block": (
        lambda: compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
        ),
        "fp8_block",
    ),
}


def stored(folder: Path, encode, config, shape=(ROWS, COLS)):
    """(the weight as the checkpoint holds it, its pieces, the float32 weight that its ecosystem says it means)."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1
    pieces, meant = encode("x.experts.0.up_proj", weight)
    save_file({key: piece.contiguous() for key, piece in pieces.items()}, folder / "model.safetensors")
    (only,) = collect(read_headers(folder), find_encodings(config))
    return only, {role: read_tensor(header) for role, header in only.pieces.items()}, meant


@pytest.mark.parametrize("name", CASES)
def test_meaning_and_bits(tmp_path: Path, name: str) -> None:
    make, wanted = CASES[name]
    encode, config = make()
    weight, pieces, meant = stored(tmp_path, encode, config)
    assert weight.name == "x.experts.0.up_proj.weight" and weight.shape == (ROWS, COLS)
    assert weight.encoding is not None
    assert torch.equal(weight.encoding.dequantize(pieces), meant)
    choice = weight.encoding.expert_choice(ExpertShape(model_dim=COLS, hidden_dim=ROWS))
    assert choice.name == wanted
    target = get_format(choice.name, group_size=choice.group_size)
    parts = weight.encoding.parts(pieces, target, "up")
    assert isinstance(parts, dict), parts
    expected = {suffix: (dims, dtype) for suffix, dims, dtype in target.weight_parts(ROWS, COLS)}
    assert {s: (tuple(t.shape), t.dtype) for s, t in parts.items()} == expected
    again = target.dequantize("up", {f"up{suffix}": tensor for suffix, tensor in parts.items()})
    assert torch.equal(again, meant)


@pytest.mark.parametrize("name", CASES)
def test_other_formats_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    make, wanted = CASES[name]
    weight, pieces, _ = stored(tmp_path, *make())
    assert weight.encoding is not None
    for other in ("int8", "fp8", "fp8_block", "mxfp4", "int4"):
        target = get_format(other, group_size=32)
        parts = weight.encoding.parts(pieces, target, "up")
        if other != wanted.removesuffix("_asym"):
            assert isinstance(parts, str) and target.name in parts


def test_act_order_means_the_same_but_is_no_record(tmp_path: Path) -> None:
    weight, pieces, meant = stored(
        tmp_path, gptq_encoder(32, act_order=True), gptq_config(32, act_order=True)
    )
    assert weight.encoding is not None
    assert torch.equal(weight.encoding.dequantize(pieces), meant)
    reason = weight.encoding.parts(pieces, get_format("int4", group_size=32), "up")
    assert isinstance(reason, str) and "act-order" in reason


def test_groups_finer_than_ours_are_no_record(tmp_path: Path) -> None:
    weight, pieces, meant = stored(tmp_path, gptq_encoder(16), gptq_config(16))
    assert weight.encoding is not None
    assert torch.equal(weight.encoding.dequantize(pieces), meant)
    assert weight.encoding.expert_choice(ExpertShape(COLS, ROWS)).group_size == 32
    reason = weight.encoding.parts(pieces, get_format("int4", group_size=32), "up")
    assert isinstance(reason, str) and "groups of 16" in reason


@pytest.mark.parametrize(("group_size", "cols", "wanted"), [(128, 192, 64), (64, 96, 32), (96, 192, 32)])
def test_odd_groups_and_a_short_last_one(tmp_path: Path, group_size: int, cols: int, wanted: int) -> None:
    encode, config = gptq_encoder(group_size, symmetric=False), gptq_config(group_size, symmetric=False)
    weight, pieces, meant = stored(tmp_path, encode, config, (64, cols))
    assert weight.encoding is not None
    assert torch.equal(weight.encoding.dequantize(pieces), meant)
    choice = weight.encoding.expert_choice(ExpertShape(model_dim=cols, hidden_dim=64))
    assert choice.group_size == wanted
    target = get_format(choice.name, group_size=wanted)
    parts = weight.encoding.parts(pieces, target, "up")
    assert isinstance(parts, dict), parts
    assert torch.equal(target.dequantize("up", {f"up{s}": t for s, t in parts.items()}), meant)


def test_zero_points_of_a_model_that_calls_itself_symmetric(tmp_path: Path) -> None:
    weight, pieces, _ = stored(tmp_path, gptq_encoder(32, symmetric=False), gptq_config(32))
    assert weight.encoding is not None
    reason = weight.encoding.parts(pieces, get_format("int4", group_size=32), "up")
    assert isinstance(reason, str) and "zero points" in reason


@pytest.mark.parametrize("form", ["scalar", "one", "rows", "column"])
def test_fp8_without_blocks(tmp_path: Path, form: str) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(ROWS, COLS, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(ROWS, generator=generator) + 0.5
    shaped = {"scalar": scale[0], "one": scale[:1], "rows": scale, "column": scale[:, None]}[form]
    save_file({"a.weight": codes, "a.weight_scale_inv": shaped.clone()}, tmp_path / "model.safetensors")
    (weight,) = collect(read_headers(tmp_path), find_encodings({"quant_method": "fp8"}))
    assert weight.encoding is not None
    pieces = {role: read_tensor(header) for role, header in weight.pieces.items()}
    expected = scale if form in ("rows", "column") else scale[:1].expand(ROWS)
    assert torch.equal(weight.encoding.dequantize(pieces), codes.float() * expected[:, None])
    parts = weight.encoding.parts(pieces, get_format("fp8"), "down")
    assert isinstance(parts, dict) and torch.equal(parts["_scale"], expected)
    assert parts[""].view(torch.uint8).equal(codes.view(torch.uint8))


def test_fp8_scales_as_exponents(tmp_path: Path) -> None:
    codes = torch.ones(128, 256).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[126, 130]], dtype=torch.uint8)
    save_file({"a.weight": codes, "a.weight_scale_inv": exponents}, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (weight,) = collect(read_headers(tmp_path), find_encodings(config))
    assert weight.encoding is not None
    pieces = {role: read_tensor(header) for role, header in weight.pieces.items()}
    assert weight.encoding.dequantize(pieces)[5, [0, 127, 128, 255]].tolist() == [0.5, 0.5, 8.0, 8.0]


def test_fused_gate_up_whose_blocks_straddle_both_is_no_record(tmp_path: Path) -> None:
    weight, pieces, _ = stored(
        tmp_path, encode_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, (192, 128)
    )
    assert weight.encoding is not None
    reason = weight.encoding.parts(pieces, get_format("fp8_block"), "gate_up")
    assert isinstance(reason, str) and "gate and of up" in reason


def test_mxfp4_blocks_as_transformers_reads_them(tmp_path: Path) -> None:
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(4)
    num_experts, hidden, model = 3, 64, 96
    blocks = torch.randint(0, 256, (num_experts, 2 * hidden, model // 32, 16), generator=generator).byte()
    scales = torch.randint(110, 135, (num_experts, 2 * hidden, model // 32), generator=generator).byte()
    base = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{base}_blocks": blocks, f"{base}_scales": scales}, tmp_path / "model.safetensors")
    meant = convert(blocks, scales, dtype=torch.float32).transpose(1, 2)  # it gives [E, K, N]
    (weight,) = collect(read_headers(tmp_path), find_encodings({"quant_method": "mxfp4"}))
    assert weight.encoding is not None and weight.name == base
    assert weight.shape == (num_experts, 2 * hidden, model)
    pieces = {role: read_tensor(header) for role, header in weight.pieces.items()}
    assert torch.equal(weight.encoding.dequantize(pieces), meant)
    apart = torch.cat((meant[:, ::2], meant[:, 1::2]), dim=1)
    assert torch.equal(weight.encoding.dequantize(pieces, "gate_up"), apart)
    parts = weight.encoding.parts(pieces, get_format("mxfp4"), "gate_up")
    assert isinstance(parts, dict)
    again = get_format("mxfp4").dequantize("gate_up", {f"gate_up{s}": t for s, t in parts.items()})
    assert torch.equal(again, apart)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits is not served"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not served: use fp8, gptq"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "g": {
                        "weights": {
                            "num_bits": 4,
                            "type": "float",
                            "strategy": "tensor_group",
                            "group_size": 16,
                        }
                    }
                },
            },
            "'nvfp4-pack-quantized' with 4-bit float weights",
        ),
    ],
)
def test_what_is_not_served_says_what_is(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_encodings(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("a.scales"), "a.qweight in .* lacks a.scales"),
        (lambda t: t.update({"a.scales": t["a.scales"].int()}), "scale is stored as I32, expected F16"),
        (lambda t: t.update({"a.qweight": t["a.qweight"].float()}), "codes is stored as F32, expected I32"),
        (
            lambda t: t.update({"a.scales": t["a.scales"][1:].clone()}),
            r"scale has shape \[3, 96\], expected \[4, 96\]",
        ),
        (lambda t: t.update({"a.g_idx": t["a.g_idx"][1:].clone()}), r"group has shape \[127\]"),
    ],
)
def test_pieces_that_do_not_belong_together(tmp_path: Path, change, message: str) -> None:
    tensors, _ = gptq_encoder(32)("a", torch.randn(ROWS, COLS))
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        collect(read_headers(tmp_path), find_encodings(gptq_config(32)))


def test_g_idx_out_of_range(tmp_path: Path) -> None:
    weight, pieces, _ = stored(tmp_path, gptq_encoder(32), gptq_config(32))
    assert weight.encoding is not None
    pieces["group"][0] = 4
    with pytest.raises(ValueError, match=r"g_idx names groups outside of 0\.\.3"):
        weight.encoding.dequantize(pieces)
