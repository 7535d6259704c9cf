"""Host side of the router that is a warp a token; `launch.route` uses it where it fits."""

from __future__ import annotations

import torch

from minisgl.moe.base import Routing, RoutingRule
from minisgl.moe.kernels.router_warp import router_warp_kernel, top_asm

MAX_TOKENS = 4096  # as far as it was measured
MAX_TOP_K = 16
EXPERTS = (64, 128, 256)  # two to eight logits a lane, in whole loads


def fits(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None) -> bool:
    """Whether the kernel reads such logits and knows the rule."""
    num_tokens, num_experts = logits_TE.shape
    sized = num_tokens <= MAX_TOKENS and num_experts in EXPERTS and rule.top_k <= MAX_TOP_K
    known = bias_E is None and (rule.scoring != "softmax" or rule.renormalize)
    aligned = logits_TE.data_ptr() % 16 == 0 and logits_TE.stride(0) * logits_TE.itemsize % 16 == 0
    return sized and known and aligned and logits_TE.dtype in (torch.float32, torch.bfloat16)


def route(
    logits_TE: torch.Tensor,
    rule: RoutingRule,
    num_valid: torch.Tensor | None,
    out: Routing,
    early: dict[str, bool],
) -> Routing:
    """Fills out, and returns it. early: options of a dependent launch."""
    num_tokens, num_experts = logits_TE.shape
    router_warp_kernel[(num_tokens,)](
        logits_TE,
        out.ids_TK if num_valid is None else num_valid,
        out.ids_TK,
        out.weights_TK,
        logits_TE.stride(0),
        rule.scaling_factor,
        K=rule.top_k,
        TOP=top_asm(num_experts, rule.top_k, logits_TE.dtype == torch.bfloat16),
        SCORING=rule.scoring,
        RENORMALIZE=rule.renormalize,
        HAS_NUM_VALID=num_valid is not None,
        num_warps=1,
        **early,
    )
    return out
