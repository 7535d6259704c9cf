"""Quantized checkpoints, whole: logits equal those of transformers with the weights that each ecosystem's own tool means."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.models.checkpoints import ExpertChoice, stored_experts
from minisgl.models.converting import convert
from minisgl.models.decoder import Decoder
from minisgl.models.experts import expert_shape, resident_moe
from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec
from minisgl.parallel import SOLO, Group
from tests.checkpoint_writers import (
    SINGLE,
    awq_config,
    awq_encoder,
    compressed_encoder,
    encode_fp8,
    gptq_config,
    gptq_encoder,
    quantize_folder,
)
from tests.e2e.model_factory import greedy, make_model, make_prompts
from tests.unit.models.decoder_harness import CPU, PAGE_SIZE, Session, cpu_attention, empty_decoder
from tests.unit.parallel.threads import on_ranks

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64}
TOKENS = [5, 17, 200, 3, 99, 42, 7]


def compressed(layout: str, **weights):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    return compressed_encoder(layout, weights)


CASES = {
    "fp8_block": lambda: (encode_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "gptq": lambda: (gptq_encoder(64), gptq_config(64)),
    "gptq_asym": lambda: (gptq_encoder(32, symmetric=False), gptq_config(32, symmetric=False)),
    "gptq_rows": lambda: (gptq_encoder(-1), gptq_config(-1)),
    "awq": lambda: (awq_encoder(32), awq_config(32)),
    "ct_int4": lambda: compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct_int8": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "ct_fp8": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
}
FORMATS = {
    "fp8_block": "fp8_block",
    "gptq": "int4",
    "gptq_asym": "int4_asym",
    "gptq_rows": "int4",
    "awq": "int4_asym",
    "ct_int4": "int4",
    "ct_int8": "int8",
    "ct_fp8": "fp8",
}


def quantized(folder: Path, case: str, name: str = "qwen3_moe", **changes) -> PreTrainedModel:
    """A tiny model, quantized in place; returns transformers' model with the weights that are meant."""
    make_model(folder, name, **{**SIZES, **changes})
    plain_config = (folder / "config.json").read_text()
    meant = quantize_folder(folder, *CASES[case]())
    return reference_model(folder, meant, plain_config)


def reference_model(folder: Path, meant: dict[str, torch.Tensor], plain_config: str) -> PreTrainedModel:
    """transformers' model with these weights."""
    reference = folder / "meant"
    reference.mkdir()
    save_file(meant, reference / SINGLE, metadata={"format": "pt"})
    (reference / "config.json").write_text(plain_config)
    return AutoModelForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def load(folder: Path, weight_format: str | None = None, group_size: int = 128) -> Decoder:
    """A decoder whose experts are stored as the checkpoint has them, or as asked."""
    spec = ModelSpec.from_folder(folder)
    factory = None
    if spec.moe is not None:
        choice = stored_experts(folder, expert_shape(spec))
        assert choice is not None
        factory = resident_moe(
            spec,
            weight_format=weight_format or choice.name,
            group_size=group_size if weight_format else choice.group_size,
            device=CPU,
            dtype=torch.float32,
        )
    decoder = empty_decoder(spec, moe_factory=factory)
    load_weights(decoder, folder)
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    return Session(decoder, 1, 16).step([(0, TOKENS)])


@torch.inference_mode()
def expected_logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_meant_weights(tmp_path: Path, case: str, caplog) -> None:
    model = quantized(tmp_path, case)
    with caplog.at_level(logging.WARNING):
        decoder = load(tmp_path)
    assert not caplog.records, "nothing was quantized anew"
    assert all(
        moe.store.format.name == FORMATS[case].removesuffix("_asym") for moe in decoder.moe_layers().values()
    )
    torch.testing.assert_close(logits_of(decoder), expected_logits(model), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", ["fp8_block", "gptq", "awq"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_other_families(tmp_path: Path, case: str, name: str) -> None:
    model = quantized(tmp_path, case, name, intermediate_size=128)
    torch.testing.assert_close(logits_of(load(tmp_path)), expected_logits(model), rtol=1e-4, atol=1e-3)


def test_the_engine_takes_the_checkpoints_own_format(tmp_path: Path) -> None:
    model = quantized(tmp_path, "awq")
    llm = LLM(str(tmp_path), device="cpu", num_pages=100)
    assert llm.config.kernel.moe_expert_quantization == "int4_asym"
    assert llm.config.kernel.moe_quantization_group_size == 32
    assert [d.value for d in llm.decisions if d.flag == "--moe-expert-quantization"] == ["int4_asym"]
    (prompt,) = make_prompts([9])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.generate([prompt], params)[0].token_ids == greedy(model, prompt, 8)


def test_plain_experts_beside_quantized_attention_stay_plain(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    encode, config = CASES["gptq"]()
    quantize_folder(tmp_path, encode, config, choose=lambda name: "self_attn" in name)
    assert stored_experts(tmp_path, expert_shape(ModelSpec.from_folder(tmp_path))) is None
    llm = LLM(str(tmp_path), device="cpu", num_pages=100)
    assert llm.config.kernel.moe_expert_quantization == "none"


def test_another_format_is_quantized_anew_and_said_so(tmp_path: Path, caplog) -> None:
    model = quantized(tmp_path, "fp8_block")
    with caplog.at_level(logging.WARNING):
        decoder = load(tmp_path, "int8")
    (record,) = caplog.records
    text = record.getMessage()
    assert "72 expert weights were quantized anew as int8, because fp8 with scales of blocks" in text
    assert "relative error added: 0." in text
    error = (logits_of(decoder) - expected_logits(model)).norm() / expected_logits(model).norm()
    assert 0 < error < 0.3  # 0.6 % in the weights, and some tokens choose another expert


def test_asked_for_none_dequantizes_without_a_warning(tmp_path: Path, caplog) -> None:
    model = quantized(tmp_path, "gptq")
    with caplog.at_level(logging.WARNING):
        decoder = load(tmp_path, "none")
    assert not caplog.records
    torch.testing.assert_close(logits_of(decoder), expected_logits(model), rtol=1e-4, atol=1e-3)


def test_act_order_is_quantized_anew(tmp_path: Path, caplog) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    config = gptq_config(32, act_order=True)
    quantize_folder(tmp_path, gptq_encoder(32, act_order=True), config)
    with caplog.at_level(logging.WARNING):
        decoder = load(tmp_path)
    (record,) = caplog.records
    assert "quantized anew as int4, because its columns are grouped in another order" in record.getMessage()
    assert logits_of(decoder).isfinite().all()


def test_mxfp4_experts_in_one_tensor_a_layer(tmp_path: Path, caplog) -> None:
    """The layout of gpt-oss's experts (rows of gate and up alternate), in a model that is served."""
    unpack = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    model = make_model(tmp_path, "qwen3_moe", **SIZES)
    tensors, generator = load_file(tmp_path / SINGLE), torch.Generator().manual_seed(7)
    plain_config, meant = (tmp_path / "config.json").read_text(), {}
    for layer in range(model.config.num_hidden_layers):
        base = f"model.layers.{layer}.mlp.experts"
        for name in [name for name in tensors if name.startswith(base)]:
            del tensors[name]
        for part, rows, cols in (("gate_up_proj", 128, 128), ("down_proj", 128, 64)):
            blocks = torch.randint(0, 256, (8, rows, cols // 32, 16), generator=generator).byte()
            scales = torch.randint(120, 125, (8, rows, cols // 32), generator=generator).byte()
            tensors |= {f"{base}.{part}_blocks": blocks, f"{base}.{part}_scales": scales}
            values = unpack(blocks, scales, dtype=torch.float32).transpose(1, 2)
            for expert, value in enumerate(values):
                halves = (
                    {"gate": value[::2], "up": value[1::2]} if part == "gate_up_proj" else {"down": value}
                )
                meant |= {f"{base}.{expert}.{n}_proj.weight": half.contiguous() for n, half in halves.items()}
    save_file(tensors, tmp_path / SINGLE)
    config = {**json.loads(plain_config), "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    reference = reference_model(tmp_path, {**dense, **meant}, plain_config)
    with caplog.at_level(logging.WARNING):
        found = logits_of(load(tmp_path))
    assert not caplog.records
    torch.testing.assert_close(found, expected_logits(reference), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("expert_format", ["mxfp4", "none", "int8"])
def test_gpt_oss_as_published(tmp_path: Path, caplog, expert_format: str) -> None:
    """Blocks, scales and interleaved biases of a whole gpt-oss, against transformers with the values it reads from them."""
    unpack = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    make_model(tmp_path, "gpt_oss", intermediate_size=64)
    tensors, generator = load_file(tmp_path / SINGLE), torch.Generator().manual_seed(3)
    plain_config, meant = (tmp_path / "config.json").read_text(), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, num_cols, num_rows = tensors.pop(
            name
        ).shape  # [E, K, N], as transformers computes with them
        shape = (num_experts, num_rows, num_cols // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        scales = torch.randint(122, 126, shape, generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = unpack(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, tmp_path / SINGLE)
    config = {**json.loads(plain_config), "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = reference_model(tmp_path, meant, plain_config)
    assert stored_experts(tmp_path, expert_shape(ModelSpec.from_folder(tmp_path))) == ExpertChoice("mxfp4")
    with caplog.at_level(logging.WARNING):
        found, expected = logits_of(load(tmp_path, expert_format)), expected_logits(model)
    if expert_format == "int8":
        assert [r for r in caplog.records if "quantized anew as int8, because mxfp4" in r.getMessage()]
        assert 0 < (found - expected).norm() < 0.5 * expected.norm()  # some tokens choose another expert
    else:
        assert not caplog.records
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_gpt_oss_of_two_ranks_and_converted(tmp_path: Path) -> None:
    """Dequantized copies lie transposed and interleaved on disk; a rank cuts what it has put in order."""
    model = make_model(tmp_path / "source", "gpt_oss")
    spec, expected = ModelSpec.from_folder(tmp_path / "source"), expected_logits(model)

    def decoder(folder: Path, weight_format: str, group: Group = SOLO) -> Decoder:
        factory = resident_moe(
            spec, weight_format=weight_format, device=CPU, dtype=torch.float32, group=group
        )
        made = Decoder(
            spec,
            cpu_attention,
            page_size=PAGE_SIZE,
            device=CPU,
            dtype=torch.float32,
            moe_factory=factory,
            group=group,
        )
        load_weights(made, folder)
        return made

    for logits in on_ranks(2, lambda group: logits_of(decoder(tmp_path / "source", "none", group))):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    convert(tmp_path / "source", tmp_path / "out", ExpertChoice("int8"), CPU)
    streamed, converted = (decoder(tmp_path / name, "int8") for name in ("source", "out"))
    for index, layer in streamed.moe_layers().items():
        other = converted.moe_layers()[index].store
        assert torch.equal(layer.store.records_EB, other.records_EB)  # type: ignore[attr-defined]
    assert torch.equal(logits_of(streamed), logits_of(converted))


def test_pieces_in_different_files(tmp_path: Path) -> None:
    model = quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / SINGLE)
    names = sorted(
        tensors, key=lambda name: name.rpartition(".")[2]
    )  # all scales together, all qweights together
    weight_map = {}
    for index in range(3):
        own = names[index::3]
        file = f"model-{index + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in own}, tmp_path / file)
        weight_map |= dict.fromkeys(own, file)
    (tmp_path / SINGLE).unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(logits_of(load(tmp_path)), expected_logits(model), rtol=1e-4, atol=1e-3)


def test_wrong_shape_of_an_expert_names_it(tmp_path: Path) -> None:
    quantized(tmp_path, "ct_int8")
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name][:, :-1].clone()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=rf"{name} in .*: expected shape \[64, 128\], found \[64, 127\]"):
        load(tmp_path)


def test_a_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ValueError, match=r"model.norm.weight is in a.safetensors and in b.safetensors"):
        load(tmp_path)
