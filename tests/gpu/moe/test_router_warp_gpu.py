"""The router that is a warp a token, on a GPU, against the definition: ties, few values, what no logit should be, padding."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.base import RoutingRule, apply_rule
from minisgl.moe.kernels import launch, launch_router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RULES = [
    RoutingRule(1),
    RoutingRule(3),
    RoutingRule(8, scaling_factor=1.5),
    RoutingRule(16, scoring="softmax_of_topk", renormalize=False),
    RoutingRule(5, scoring="sigmoid"),
    RoutingRule(7, scoring="sigmoid", renormalize=False, scaling_factor=2.5),
]


def odd_logits(num_experts: int, top_k: int) -> torch.Tensor:
    """[32, E] on the CPU: random rows, and at the beginning those in which values repeat or are no numbers."""
    inf, nan = float("inf"), float("nan")
    logits = torch.randn(32, num_experts, generator=torch.Generator().manual_seed(top_k)) * 3
    logits[0] = 0.5
    logits[1] = nan
    logits[2] = -inf
    logits[3, 3:40] = inf
    logits[4, ::2], logits[4, 1::2] = -0.0, 0.0
    logits[5] = (logits[5] / 3).round()
    logits[6], logits[6, 7 : 7 + top_k] = 0.0, 1.0  # two values, the larger one K times
    logits[7], logits[7, 50 : 50 + top_k + 1] = -1.0, -0.5
    logits[8, 5], logits[8, 7], logits[8, 9] = nan, inf, -inf
    logits[9] = -logits[9].abs() * 1e-39  # subnormal
    logits[10], logits[10, :1] = -3.0, 2.0
    logits[11] = logits[11].sort(descending=True).values
    return logits


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", launch_router.EXPERTS)
def test_router_equals_the_definition(rule, dtype, num_experts):
    if not launch.has_dependent_launch(torch.device("cuda")):
        pytest.skip("used from compute capability 9.0 on")
    wide = torch.zeros(32, num_experts + 64, dtype=dtype, device="cuda")
    wide[:, :num_experts] = odd_logits(num_experts, rule.top_k)
    logits, num_valid = wide[:, :num_experts], torch.tensor([30], dtype=torch.int32, device="cuda")
    assert launch_router.fits(logits, rule, None)
    actual, expected = launch.route(logits, rule, None, num_valid), apply_rule(logits, rule, None, num_valid)
    assert torch.equal(actual.ids_TK, expected.ids_TK)
    torch.testing.assert_close(actual.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-7)
    alone = launch.route(logits[:1], rule, None, None)
    assert torch.equal(alone.ids_TK, expected.ids_TK[:1])
