"""Rotation against Hugging Face's own frequencies and function, for every scaling, near and far."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minisgl.layers.rotary import RopeSpec, Rotary, apply_rotary, inverse_frequencies, yarn_attention_factor
from minisgl.models.spec import ModelSpec

CPU = torch.device("cpu")
BASE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn_numbers": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn_attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.5,
    },
}


def both(scaling):
    """(Hugging Face's module, ours) for one scaling, theta 10,000 and 512 positions."""
    rope = {"rope_theta": 1e4, **scaling}
    config = LlamaConfig(**BASE, max_position_embeddings=512, rope_parameters=dict(rope))
    raw = {
        **BASE,
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    return LlamaRotaryEmbedding(config), Rotary(ModelSpec.from_config(raw).rope, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rotation_equals_hugging_face(scaling, dtype):
    theirs, ours = both(scaling)
    positions = torch.randint(0, 512, (33,), generator=torch.Generator().manual_seed(0))
    q, k = torch.randn(33, 4, 64).to(dtype), torch.randn(33, 2, 64).to(dtype)
    cos, sin = theirs(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos[0], sin[0])
    rotation = ours(positions, dtype)
    assert torch.equal(apply_rotary(q, *rotation), expected_q)
    assert torch.equal(apply_rotary(k, *rotation), expected_k)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "dynamic"])
def test_far_positions(name):
    """Up to 100,000, where a relative error of 1e-6 in a frequency would already turn a pair visibly."""
    theirs, ours = both(SCALINGS[name])
    positions = torch.tensor([5_000, 33_333, 99_999])
    cos, sin = theirs(torch.zeros(1), positions[None])
    our_cos, our_sin = ours(positions, torch.float32)
    assert torch.equal(our_cos[:, 0], cos[0, :, :32])
    assert torch.equal(our_sin[:, 0], sin[0, :, :32])


def test_dynamic_grows_with_each_position():
    """Decoding one token at a time, as Hugging Face does it, gives what all positions at once give here."""
    theirs, ours = both(SCALINGS["dynamic"])
    positions = torch.arange(500, 700)
    our_cos, our_sin = ours(positions, torch.float32)
    for index, position in enumerate(positions):
        cos, sin = theirs(torch.zeros(1), position.view(1, 1))
        torch.testing.assert_close(our_cos[index, 0], cos[0, 0, :32], rtol=0, atol=2e-4)
        torch.testing.assert_close(our_sin[index, 0], sin[0, 0, :32], rtol=0, atol=2e-4)
    # and it is not the unscaled rotation there
    plain, _ = Rotary(RopeSpec(64, max_position=512), CPU)(positions, torch.float32)
    assert (plain[-1] - our_cos[-1]).abs().max() > 0.1
    torch.testing.assert_close(plain[:12], our_cos[:12], rtol=0, atol=1e-5)


def test_rotation_keeps_length_and_leaves_the_rest():
    spec = RopeSpec(rotary_dim=16)
    x = torch.randn(5, 3, 24)
    before = x.clone()
    y = apply_rotary(x, *Rotary(spec, CPU)(torch.arange(5), torch.float32))
    assert torch.equal(x, before)
    assert torch.equal(y[..., 16:], x[..., 16:])
    assert torch.equal(y[0], x[0])
    assert not torch.equal(y[1:], x[1:])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_relative_position_decides_the_product():
    rotary = Rotary(RopeSpec(rotary_dim=32), CPU)
    q, k = torch.randn(1, 1, 32, dtype=torch.float64), torch.randn(1, 1, 32, dtype=torch.float64)

    def product(q_position, k_position):
        rotated_q = apply_rotary(q, *rotary(torch.tensor([q_position]), torch.float64))
        rotated_k = apply_rotary(k, *rotary(torch.tensor([k_position]), torch.float64))
        return float((rotated_q * rotated_k).sum())

    assert product(17, 5) == pytest.approx(product(112, 100), abs=1e-4)


def test_frequencies_of_the_plain_kind():
    expected = [10_000.0 ** (-2 * j / 8) for j in range(4)]
    torch.testing.assert_close(inverse_frequencies(RopeSpec(8)), torch.tensor(expected))


def test_yarn_temperature():
    assert yarn_attention_factor(1.0, None, None) == 1.0
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(4.0, None, None) == pytest.approx(1.13863, abs=1e-5)
