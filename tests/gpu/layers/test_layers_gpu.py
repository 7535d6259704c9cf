"""The layers' and the sampler's kernels on a GPU: equal to the torch code they stand for, in bf16, chained, and in graphs."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from minisgl.attention import AttentionBatch, AttentionProblem, LayerCache
from minisgl.attention.torch_sdpa import TorchAttention
from minisgl.core import SamplingParams
from minisgl.engine import sampler
from minisgl.engine.step import SampleSpec
from minisgl.layers import attention, launch, mlp, norm
from minisgl.layers.attention import Attention
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeSpec, Rotary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SIZES = [1, 7, 64, 300]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def plainly(call):
    """What the layers' torch code gives on the same device."""
    with ExitStack() as stack:
        for module in (attention, mlp, norm):
            stack.enter_context(patch.object(module, "use_kernels", return_value=False))
        return call()


def ulps(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Largest distance in steps of the 16-bit type; infinite signs differ by nothing at zero."""
    steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    return int(torch.where(ours == theirs, 0, steps).max())


def random_norm(dim: int) -> RMSNorm:
    layer = RMSNorm(dim, 1e-6, device=CUDA, dtype=BF16)
    layer.weight.normal_()
    return layer


@pytest.mark.parametrize("dim", [2048, 5120, 100])
@pytest.mark.parametrize("tokens", SIZES)
def test_norm_is_within_one_step(tokens, dim):
    layer = random_norm(dim)
    x, residual = torch.randn(2, tokens, dim, device=CUDA, dtype=BF16) * 5
    for left in (None, residual):
        y, total = layer.add(x, left)
        expected_y, expected_total = plainly(lambda left=left: layer.add(x, left))
        assert torch.equal(total, expected_total)
        assert ulps(y, expected_y) <= 1
        assert (y == expected_y).float().mean() > 0.999


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shape", [(32, 4, 128, 128), (14, 2, 64, 64), (3, 1, 80, 40)])
@pytest.mark.parametrize("tokens", SIZES)
def test_heads_equal_torch(tokens, shape, qk_norm):
    heads, kv_heads, dim, rotary_dim = shape
    problem = AttentionProblem(heads, kv_heads, dim, page_size=16, dtype=BF16, scale=1.0)
    layer = Attention(16, problem, TorchAttention(), qk_norm_eps=1e-6 if qk_norm else None, device=CUDA)
    for parameter in layer.parameters():
        parameter.normal_()
    qkv_TX = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=CUDA, dtype=BF16)
    rotation = Rotary(RopeSpec(rotary_dim), CUDA)(torch.randint(0, 40_000, (tokens,), device=CUDA), BF16)
    pools = torch.zeros(4, 30, 16, kv_heads, dim, device=CUDA, dtype=BF16).unbind()
    ours, theirs = LayerCache(pools[0], pools[1]), LayerCache(pools[2], pools[3])
    slots_T = torch.randperm(30 * 16, device=CUDA)[:tokens]
    q_THC = launch.rotate_and_store(qkv_TX, problem, layer.head_norms(), rotation, ours, slots_T)
    one = torch.ones(tokens, dtype=torch.int32, device=CUDA)
    batch = AttentionBatch(one, one, one[:, None], slots_T, 1, 1)
    expected_THC = plainly(lambda: layer.rotate_and_store(qkv_TX, rotation, theirs, batch))
    assert torch.equal(ours.v_PSGC, theirs.v_PSGC)
    for got, expected in ((q_THC, expected_THC), (ours.k_PSGC, theirs.k_PSGC)):
        if not qk_norm:
            assert torch.equal(got, expected)
        # The order of a norm's sum may turn a rounding, and a rotation may magnify that where it cancels.
        assert (got == expected).float().mean() > 0.999
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("tokens", SIZES)
def test_mlp_is_within_one_step(tokens, activation):
    gate_up_TF = torch.randn(tokens, 2 * 1000, device=CUDA, dtype=BF16) * 4
    ours = launch.gated_activation(gate_up_TF, activation)
    theirs = mlp.activate(gate_up_TF, activation)
    if activation == "silu":
        assert ulps(ours, theirs) <= 2, "two roundings, each of which may turn"
    else:  # 1 + erf cancels for very negative gates, so a last bit of erf is many steps of a tiny result
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-4)
    assert (ours == theirs).float().mean() > (0.999 if activation == "silu" else 0.9)
    layer = GatedMLP(64, 96, activation, device=CUDA, dtype=BF16)
    for parameter in layer.parameters():
        parameter.normal_()
    x_TD = torch.randn(tokens, 64, device=CUDA, dtype=BF16)
    torch.testing.assert_close(layer(x_TD), plainly(lambda: layer(x_TD)), rtol=2e-2, atol=2)


def test_few_rows_equal_float64():
    """As `linear` chooses, every tile: widths that fill no block among them."""
    for rows, out_dim, in_dim in (
        (1, 5120, 2048),
        (1, 130, 5120),
        (3, 100, 200),
        (8, 128, 2048),
        (8, 70_001, 96),
    ):
        x = torch.randn(rows, in_dim, device=CUDA, dtype=BF16)
        weight, bias = (
            torch.randn(out_dim, in_dim, device=CUDA, dtype=BF16),
            torch.randn(out_dim, device=CUDA),
        )
        assert launch.choose_tile(rows, out_dim, in_dim, BF16) is not None
        expected = x.double() @ weight.double().T
        for b in (None, bias.to(BF16)):
            y = launch.linear(x, weight, b).double()
            target = expected if b is None else expected + b.double()
            assert float((y - target).norm() / target.norm()) < 3e-3


def test_a_chain_of_dependent_launches_is_right_in_a_graph():
    """Each kernel may start before the previous one ends: nothing may be read too early, replay after replay."""
    norms = [random_norm(1024) for _ in range(8)]
    weights = [torch.randn(1024, 1024, device=CUDA, dtype=BF16) / 32 for _ in range(8)]
    x_TD = torch.zeros(1, 1024, device=CUDA, dtype=BF16)

    def chain(wait: bool) -> torch.Tensor:
        x, residual = x_TD, None
        for layer, weight in zip(norms, weights):
            x, residual = layer.add(x, residual)
            if wait:
                torch.cuda.synchronize()
            x = launch.linear(x, weight, None)
            if wait:
                torch.cuda.synchronize()
        return x

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(False)
    for _ in range(20):
        x_TD.normal_()
        graph.replay()
        assert torch.equal(out, chain(True))


def spec(seed: int, **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed, 5, [1, 2], 1, frozenset())


def test_sampled_tokens_equal_those_of_the_cpu():
    logits = torch.randn(48, 151_936) * 4
    logits[7, 5], logits[8] = float("nan"), -float("inf")
    choices = (
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.8},
    )
    specs = [spec(i, **choices[i % 4]) for i in range(48)]
    specs[9] = spec(9, temperature=0.9, logit_bias={11: 3.0})
    ours, theirs = sampler.sample(logits.to(CUDA), specs), sampler.sample(logits, specs)
    good = theirs.valid_B
    assert torch.equal(ours.valid_B.cpu(), good) and int(good.sum()) == 46
    assert torch.equal(ours.tokens_B.cpu()[good], theirs.tokens_B[good])
