"""Which logits the router that is a warp a token takes, and that it compiles without shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from minisgl.moe.base import RoutingRule
from minisgl.moe.kernels import launch, launch_router
from tests.unit.moe.test_place_compile import spilled_bytes
from tests.unit.moe.test_words_compile import compiled  # noqa: F401


def test_what_it_does_not_know_goes_elsewhere():
    logits = torch.zeros(4, 128)
    assert launch_router.fits(logits, RoutingRule(8), None)
    assert not launch_router.fits(logits, RoutingRule(8, renormalize=False), None)
    assert not launch_router.fits(logits, RoutingRule(8), torch.zeros(128))
    assert not launch_router.fits(logits, RoutingRule(17), None)
    assert not launch_router.fits(logits.half(), RoutingRule(8), None)
    assert not launch_router.fits(torch.zeros(4097, 128), RoutingRule(8), None)
    assert not launch_router.fits(torch.zeros(4, 60), RoutingRule(8), None)
    assert not launch_router.fits(torch.zeros(4, 130)[:, 1:129], RoutingRule(8), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [128, 256])
def test_it_compiles_without_shared_memory(num_experts, dtype, compiled: dict[str, Any], tmp_path):  # noqa: F811
    launch.route(torch.empty(2, num_experts, dtype=dtype), RoutingRule(8), None, None)
    (kernel,) = compiled.values()
    assert "router_warp_kernel" in compiled
    assert (kernel.metadata.shared, spilled_bytes(kernel, tmp_path)) == (0, 0)
