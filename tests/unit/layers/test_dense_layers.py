"""Norm, linear, embedding and dense MLP against Hugging Face's modules or the plain formula."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from minisgl.layers.embedding import Embedding, LmHead
from minisgl.layers.linear import Linear, MergedLinear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.parallel import Shard

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 48), (3, 4, 16), (0, 48)])
def test_rms_norm_equals_hugging_face(dtype, shape):
    theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    ours = RMSNorm(shape[-1], 1e-5, device=CPU, dtype=dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    theirs.weight.data.copy_(weight)
    ours.weight.copy_(weight)
    x = (torch.randn(shape) * 3).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_rms_norm_of_large_values_does_not_overflow():
    norm = RMSNorm(8, 1e-6, device=CPU, dtype=torch.float16)
    norm.weight.fill_(1.0)
    assert torch.equal(
        norm(torch.full((1, 8), 6e4, dtype=torch.float16)), torch.ones(1, 8, dtype=torch.float16)
    )


def test_add_then_norm():
    norm = RMSNorm(8, 1e-6, device=CPU, dtype=torch.bfloat16)
    norm.weight.copy_(torch.randn(8))
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    before = x.clone(), residual.clone()
    y, total = norm.add(x, residual)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(y, norm(before[0] + before[1]))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    y, total = norm.add(x, None)
    assert torch.equal(total, x)
    assert torch.equal(y, norm(x))


@pytest.mark.parametrize("bias", [False, True])
def test_merged_linear_is_its_parts(bias):
    merged = MergedLinear(
        6, {"q": Shard(4), "k": Shard(2), "v": Shard(3)}, bias=bias, device=CPU, dtype=torch.float32
    )
    places = merged.places()
    assert sorted(places) == sorted(
        f"{p}.{t}" for p in "qkv" for t in (["weight", "bias"] if bias else ["weight"])
    )
    for place in places.values():
        place.copy_(torch.randn(place.shape))
    x = torch.randn(5, 6)
    for name, y in zip("qkv", merged.split(merged(x))):
        expected = x @ places[f"{name}.weight"].T + (places[f"{name}.bias"] if bias else 0)
        torch.testing.assert_close(y, expected)


def test_linear_wants_no_gradient():
    linear = Linear(3, 2, bias=True, device=CPU, dtype=torch.float32)
    assert not any(p.requires_grad for p in linear.parameters())
    assert linear(torch.zeros(0, 3)).shape == (0, 2)


def test_mlp_equals_hugging_face():
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, intermediate_size=24, mlp_bias=True)
    theirs = LlamaMLP(config)
    ours = GatedMLP(16, 24, "silu", bias=True, device=CPU, dtype=torch.float32)
    places = ours.gate_up.places()
    for part in ("gate", "up"):
        source = getattr(theirs, f"{part}_proj")
        places[f"{part}.weight"].copy_(source.weight.data)
        places[f"{part}.bias"].copy_(source.bias.data)
    ours.down.weight.copy_(theirs.down_proj.weight.data)
    assert ours.down.bias is not None
    ours.down.bias.copy_(theirs.down_proj.bias.data)
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=1e-6)


def test_embedding_and_heads():
    embedding = Embedding(10, 4, device=CPU, dtype=torch.bfloat16)
    embedding.weight.copy_(torch.randn(10, 4))
    ids = torch.tensor([3, 9, 3], dtype=torch.int32)
    vectors = embedding(ids)
    assert torch.equal(vectors, embedding.weight[ids.long()])
    tied = LmHead(10, 4, tied_to=embedding, device=CPU, dtype=torch.bfloat16)
    assert tied.weight is embedding.weight
    logits = tied(vectors)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (vectors @ embedding.weight.T).float())
    own = LmHead(10, 4, device=CPU, dtype=torch.bfloat16)
    assert own.weight is not embedding.weight
