"""The cut of a dense Llama into experts computes the same function, and refuses what it cannot represent."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.upcycle import upcycle, upcycle_config

CONFIG = {"model_type": "llama", "intermediate_size": 64, "hidden_size": 16}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_experts", [2, 8])
def test_logits_equal_the_dense_model(tmp_path, tied, num_experts):
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
    )
    dense = LlamaForCausalLM(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", num_experts)
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    assert type(moe).__name__ == "MixtralForCausalLM"
    assert moe.config.num_local_experts == moe.config.num_experts_per_tok == num_experts
    tokens = torch.randint(97, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(moe(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "only Llama"),
        ({"mlp_bias": True}, "no biases"),
        ({"intermediate_size": 60}, "not divisible"),
    ],
)
def test_unfit_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        upcycle_config(CONFIG | change, 8)


def test_number_of_experts_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="power of two"):
        upcycle_config(CONFIG | {"intermediate_size": 66}, 6)
