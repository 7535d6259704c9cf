"""GGUF files, written by the gguf package: names, row orders and block types mean what the package says they mean."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import AutoModelForCausalLM

from minisgl.models.checkpoints import ExpertChoice, stored_experts
from minisgl.models.converting import convert
from minisgl.models.experts import expert_shape, resident_moe
from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec
from tests.e2e.model_factory import make_model
from tests.unit.models.decoder_harness import CPU, Session, empty_decoder

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
Type = gguf.GGMLQuantizationType

TOKENS = [5, 17, 200, 3, 99, 42, 7]
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def blocks_of(weight: np.ndarray, kind) -> np.ndarray:
    """Quantized bytes. The package writes no K-quants: for them random blocks with scales of about the right size."""
    try:
        return gguf.quantize(weight, kind)
    except NotImplementedError:
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(0).integers(0, 256, (weight.size // size, num_bytes), dtype=np.uint8)
        half = {Type.Q4_K: [0, 2], Type.Q6_K: [208]}[kind]
        for at in half:
            blocks[:, at : at + 2] = np.full((len(blocks), 1), 1e-4, dtype=np.float16).view(np.uint8)
        return blocks.reshape(*weight.shape[:-1], -1)


def rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2 i + s of a head, as GGUF has it, is row i of its half s."""
    out = np.empty_like(weight)
    dim = len(weight) // num_heads
    for head in range(num_heads):
        for i in range(dim // 2):
            for half in range(2):
                out[head * dim + 2 * i + half] = weight[head * dim + half * (dim // 2) + i]
    return out


def write_gguf(folder: Path, arch: str, kinds: dict[str, object]) -> dict[str, torch.Tensor]:
    """Turn the safetensors of `folder` into model.gguf, and return what it means. kinds: GGUF stem -> type, else F32."""
    plain = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    meant: dict[str, torch.Tensor] = {}

    def add(theirs: str, stem: str, weight: np.ndarray) -> np.ndarray:
        kind = kinds.get(stem, Type.F32)
        if kind == Type.F32:
            writer.add_tensor(theirs, weight)
            return weight
        data = blocks_of(weight, kind)
        writer.add_tensor(theirs, data, raw_dtype=kind)
        return gguf.dequantize(data, kind).reshape(weight.shape)

    experts: dict[tuple[str, str], list[str]] = {}
    for name, tensor in plain.items():
        parts = name.removesuffix(".weight").split(".")
        weight = tensor.float().numpy()
        if name.removesuffix(".weight") in TOP:
            stem = TOP[name.removesuffix(".weight")]
            meant[name] = torch.from_numpy(add(f"{stem}.weight", stem, weight).copy())
        elif "experts" in parts:
            experts.setdefault((parts[2], parts[-1]), []).append(name)
        else:
            stem = LAYER[".".join(parts[3:]).replace("block_sparse_moe", "mlp")]
            permute = arch == "llama" and stem in heads
            stored = rope_rows(weight, heads[stem]) if permute else weight
            value = add(f"blk.{parts[2]}.{stem}.weight", stem, stored)
            if permute:  # the same permutation, undone by looking rows up
                order = rope_rows(np.arange(len(weight))[:, None], heads[stem])[:, 0]
                value = value[np.argsort(order)]
            meant[name] = torch.from_numpy(value.copy())
    short = {
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
        "w1": "gate",
        "w3": "up",
        "w2": "down",
    }
    for (layer, part), names in experts.items():
        names.sort(key=lambda name: int(name.split(".")[-3]))
        stem = f"ffn_{short[part]}_exps"
        value = add(f"blk.{layer}.{stem}.weight", stem, np.stack([plain[n].float().numpy() for n in names]))
        meant |= {name: torch.from_numpy(value[i].copy()) for i, name in enumerate(names)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@torch.inference_mode()
def expected_logits(folder: Path, meant: dict[str, torch.Tensor]) -> torch.Tensor:
    reference = folder / "meant"
    reference.mkdir()
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    (reference / "config.json").write_text((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(torch.tensor([TOKENS])).logits[0]


def logits(folder: Path, choice: ExpertChoice | None = None) -> torch.Tensor:
    spec, factory = ModelSpec.from_folder(folder), None
    if spec.moe is not None:
        choice = choice or stored_experts(folder, expert_shape(spec)) or ExpertChoice("none")
        factory = resident_moe(
            spec, weight_format=choice.name, group_size=choice.group_size, device=CPU, dtype=torch.float32
        )
    decoder = empty_decoder(spec, moe_factory=factory)
    load_weights(decoder, folder)
    return Session(decoder, 1, 16).step([(0, TOKENS)])


def all_experts(kind) -> dict[str, object]:
    return {f"ffn_{part}_exps": kind for part in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("name", "arch", "kinds", "choice"),
    [
        ("qwen3_moe", "qwen3moe", all_experts(Type.Q4_0), ExpertChoice("int4", 32)),
        ("qwen3_moe", "qwen3moe", {**all_experts(Type.MXFP4), "attn_q": Type.Q8_0}, ExpertChoice("mxfp4")),
        ("qwen3_moe", "qwen3moe", {**all_experts(Type.F16), "token_embd": Type.BF16}, None),
        ("mixtral", "llama", {**all_experts(Type.Q4_0), "attn_q": Type.Q4_0}, ExpertChoice("int4", 32)),
        ("llama", "llama", {"attn_q": Type.Q8_0, "attn_k": Type.Q4_0, "ffn_up": Type.Q4_K, "output": Type.Q6_K}, None),
    ],
)  # fmt: skip
def test_kept_as_it_is(tmp_path: Path, caplog, name: str, arch: str, kinds: dict, choice) -> None:
    make_model(tmp_path, name, **SIZES)
    meant = write_gguf(tmp_path, arch, kinds)
    spec = ModelSpec.from_folder(tmp_path)
    if spec.moe is not None:
        assert stored_experts(tmp_path, expert_shape(spec)) == choice
    with caplog.at_level(logging.WARNING):
        found = logits(tmp_path)
    assert not caplog.records
    torch.testing.assert_close(found, expected_logits(tmp_path, meant), rtol=1e-4, atol=1e-3)


def test_mixed_k_quants_are_quantized_anew_and_exact_when_asked_for_plain(tmp_path: Path, caplog) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    meant = write_gguf(tmp_path, "qwen3moe", {**all_experts(Type.Q4_K), "ffn_down_exps": Type.Q6_K})
    choice = stored_experts(tmp_path, expert_shape(ModelSpec.from_folder(tmp_path)))
    assert choice == ExpertChoice("int4_asym", 32)
    with caplog.at_level(logging.WARNING):
        logits(tmp_path)
    assert sorted(record.getMessage().split("because ")[1].split(";")[0] for record in caplog.records) == [
        "GGUF's Q4_K is not int4",
        "GGUF's Q6_K is not int4",
    ]
    found = logits(tmp_path, ExpertChoice("none"))
    torch.testing.assert_close(found, expected_logits(tmp_path, meant), rtol=1e-4, atol=1e-3)


def test_eight_bits_become_int8_and_the_log_says_what_it_costs(tmp_path: Path, caplog) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    meant = write_gguf(tmp_path, "qwen3moe", all_experts(Type.Q8_0))
    assert stored_experts(tmp_path, expert_shape(ModelSpec.from_folder(tmp_path))) == ExpertChoice("int8")
    with caplog.at_level(logging.WARNING):
        found = logits(tmp_path)
    (record,) = caplog.records
    assert "as int8, because GGUF's Q8_0 is not int8; relative error added: 0." in record.getMessage()
    expected = expected_logits(tmp_path, meant)
    assert (found - expected).norm() < 0.3 * expected.norm()


def test_convert_from_gguf(tmp_path: Path) -> None:
    make_model(tmp_path / "source", "qwen3_moe", **SIZES)
    write_gguf(tmp_path / "source", "qwen3moe", all_experts(Type.Q4_0))
    convert(tmp_path / "source", tmp_path / "out", ExpertChoice("int4", 32), CPU)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "source"))


def test_damage_and_strangers(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", **SIZES)
    write_gguf(tmp_path, "llama", {"ffn_up": Type.Q8_0})
    data = (tmp_path / "model.gguf").read_bytes()
    for keep in (0, 3, 200, len(data) // 2, len(data) - 1):
        (tmp_path / "model.gguf").write_bytes(data[:keep])
        with pytest.raises(ValueError, match=r"model.gguf is truncated or damaged"):
            logits(tmp_path)
    (tmp_path / "model.gguf").write_bytes(data)
    (tmp_path / "model-Q8_0.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"2 GGUF models \(model, model-Q8_0\): leave one there"):
        logits(tmp_path)
