"""Checkpoints in every layout load alike; damaged ones say what is wrong with them; memory holds one copy."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.models.checkpoints.files import INDEX, read_headers
from minisgl.models.checkpoints.readahead import LIMIT
from minisgl.models.loader import NameMap, Target, load_weights
from minisgl.models.spec import ModelSpec
from tests.e2e.model_factory import make_model
from tests.unit.models.decoder_harness import empty_decoder, load_decoder

SINGLE = "model.safetensors"
ROOT = Path(__file__).parents[3]


def weights_of(decoder):
    """Every stored number, experts included."""
    out = {name: place.clone() for name, place in decoder.places().items()}
    for layer, moe in decoder.moe_layers().items():
        out |= {f"{layer}.{part}": tensor.clone() for part, tensor in moe.store.parts.items()}
    return out


def rewrite(folder, change):
    """Apply `change` to the dictionary of tensors of a single-file checkpoint."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(("fused", "shard"), [(True, "1GB"), (False, "40KB"), (True, "40KB")])
def test_layouts_load_alike(tmp_path, name, fused, shard):
    make_model(tmp_path / "plain", name)
    make_model(tmp_path / "other", name, fused_experts=fused, max_shard_size=shard)
    assert (tmp_path / "other" / INDEX).is_file() == (shard == "40KB")
    expected, found = (weights_of(load_decoder(tmp_path / f)) for f in ("plain", "other"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize(
    ("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")]
)
def test_dtype_is_converted_on_the_way(tmp_path, stored, wanted):
    make_model(tmp_path, "qwen3_moe", dtype=getattr(torch, stored))
    tensors = load_file(tmp_path / SINGLE)
    decoder = load_decoder(tmp_path, getattr(torch, wanted))
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert query.dtype == getattr(torch, stored)
    assert torch.equal(decoder.places()["layers.1.attention.q.weight"], query.to(getattr(torch, wanted)))
    up = tensors["model.layers.2.mlp.experts.5.up_proj.weight"].to(getattr(torch, wanted))
    assert torch.equal(decoder.moe_layers()[2].store.parts["gate_up"][5, len(up) :], up)


def test_report_counts_bytes(tmp_path):
    model = make_model(tmp_path, "llama")
    report = load_weights(empty_decoder(ModelSpec.from_folder(tmp_path)), tmp_path)
    assert report.num_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert report.num_tensors == len(read_headers(tmp_path))
    assert "GB/s" in str(report)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("llama", "lm_head.weight", r"lacks lm_head.weight \[272, 64\]"),
        (
            "llama",
            "model.layers.1.self_attn.k_proj.weight",
            r"model.layers.1.self_attn.k_proj.weight \[32, 64\]",
        ),
        ("qwen2", "model.layers.2.self_attn.v_proj.bias", r"model.layers.2.self_attn.v_proj.bias \[32\]"),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.gate.weight",
            r"model.layers.0.\S*gate.weight \[4, 64\]",
        ),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight", "layer 1 lacks weights: expert 3: up"),
    ],
)
def test_missing_tensor(tmp_path, name, tensor, message):
    make_model(tmp_path, name)
    rewrite(tmp_path, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ValueError, match=message):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("llama", "model.norm.weight", r"shape \[64\]"),
        ("llama", "model.layers.0.mlp.up_proj.weight", r"shape \[96, 64\]"),
        ("qwen3_moe", "model.layers.0.mlp.experts.7.down_proj.weight", r"shape \[64, 32\]"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight", r"shape \[96, 64\]"),
    ],
)
def test_misshapen_tensor(tmp_path, name, tensor, expected):
    make_model(tmp_path, name)

    def cut(tensors):
        tensors[tensor] = tensors[tensor][:-1].clone()

    rewrite(tmp_path, cut)
    found = list(load_file(tmp_path / SINGLE)[tensor].shape)
    with pytest.raises(ValueError) as error:
        load_decoder(tmp_path)
    message = str(error.value)
    assert tensor in message and SINGLE in message and str(found) in message
    with pytest.raises(ValueError, match=expected):
        load_decoder(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 3_000, -1])
def test_truncated_file(tmp_path, keep):
    make_model(tmp_path, "llama")
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        load_decoder(tmp_path)


def test_file_that_is_something_else(tmp_path):
    make_model(tmp_path, "llama")
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        load_decoder(tmp_path)


def test_shard_missing_or_incomplete(tmp_path):
    make_model(tmp_path, "qwen3", max_shard_size="40KB")
    index = json.loads((tmp_path / INDEX).read_text())
    first = index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(tmp_path / first)
    (tmp_path / first).unlink()
    with pytest.raises(ValueError, match=f"{first} is missing"):
        load_decoder(tmp_path)
    tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "model.other": torch.zeros(1)}, tmp_path / first)
    with pytest.raises(ValueError, match=rf"{first} lacks model\.embed_tokens\.weight, which"):
        load_decoder(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": ')
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load_decoder(tmp_path)


def test_index_decides_which_files_are_read(tmp_path):
    make_model(tmp_path, "llama", max_shard_size="40KB")
    (tmp_path / "zz-left-over.safetensors").write_bytes(b"not read")
    load_decoder(tmp_path)


def test_one_file_with_the_usual_name_is_enough(tmp_path):
    make_model(tmp_path, "llama")
    (tmp_path / "adapter.safetensors").write_bytes(b"not read")
    load_decoder(tmp_path)


def test_no_safetensors(tmp_path):
    make_model(tmp_path, "llama")
    (tmp_path / SINGLE).rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        load_decoder(tmp_path)
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "weights.safetensors")
    load_decoder(tmp_path)


def test_harmless_and_unknown_tensors(tmp_path, caplog):
    make_model(tmp_path, "qwen3_moe_tied")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.3.mlp.experts.0.gate_proj.weight": torch.zeros(1),  # a prediction layer behind the last
        "lm_head.weight": torch.zeros(2, 2),  # saved although tied
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.WARNING):
        load_decoder(tmp_path)
    assert not caplog.records
    odd = {f"model.layers.1.self_attn.new_{i}": torch.zeros(1) for i in range(6)}
    rewrite(tmp_path, lambda tensors: tensors.update(odd))
    with caplog.at_level(logging.WARNING):
        load_decoder(tmp_path)
    (record,) = caplog.records
    assert "ignored 6 unknown tensors: model.layers.1.self_attn.new_0" in record.getMessage()
    assert "and 2 more" in record.getMessage()


def test_codes_without_a_meaning_are_refused(tmp_path):
    make_model(tmp_path, "llama")

    def to_fp8(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.float8_e4m3fn)

    rewrite(tmp_path, to_fp8)
    with pytest.raises(
        ValueError, match=r"up_proj.weight in .* is stored as F8_E4M3, and config.json names no"
    ):
        load_decoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="weights quantized with 'bitsandbytes' are not served: use fp8, gptq"
    ):
        load_decoder(tmp_path)


def test_names(tmp_path):
    make_model(tmp_path, "qwen3_moe_mixed")
    spec = ModelSpec.from_folder(tmp_path)  # layer 1 is sparse, 0, 2 and 3 are dense
    names = NameMap(spec)
    assert names.target("model.norm.weight") == Target("norm.weight")
    assert names.target("model.layers.12.self_attn.q_norm.weight") == Target(
        "layers.12.attention.q_norm.weight"
    )
    assert names.target("model.layers.1.mlp.experts.7.up_proj.weight") == Target(layer=1, part="up", expert=7)
    assert names.target("model.layers.1.mlp.experts.gate_up_proj") == Target(layer=1, part="gate_up")
    assert names.target("model.layers.0.mlp.experts.7.up_proj.weight") is None
    assert names.target("model.layers.1.mlp.experts.7.8.weight") is None
    assert names.target("visual.blocks.0.weight") is None
    assert names.checkpoint_name("layers.3.mlp.up.weight") == "model.layers.3.mlp.up_proj.weight"
    assert names.checkpoint_name("embedding.weight") == "model.embed_tokens.weight"


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    make_model(tmp_path, "llama")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    load_decoder(tmp_path)
    assert "loading weights" in terminal.getvalue()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads anonymous memory from /proc")
def test_no_second_copy_in_memory(tmp_path):
    """A 300 MB checkpoint: memory grows by the model itself, about one tensor, and what is read ahead."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    spec = ModelSpec.from_config(config)
    decoder, names = empty_decoder(spec), NameMap(spec)
    tensors = {names.checkpoint_name(p): torch.full(t.shape, 0.5) for p, t in decoder.places().items()}
    for layer in range(4):
        for expert in range(8):
            for part, shape in (("w1", (1024, 768)), ("w2", (768, 1024)), ("w3", (1024, 768))):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
                tensors[name] = torch.full(shape, 0.5)
    save_file(tensors, tmp_path / SINGLE)
    size = (tmp_path / SINGLE).stat().st_size
    assert size > 300e6
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Here, memory that earlier tests freed would be taken again, and not show as growth.
    command = [sys.executable, "-m", "tests.unit.models.memory_of_loading", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert 0.8 * size < int(result.stdout) < 1.1 * size + LIMIT
