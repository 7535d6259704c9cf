"""Mixtral: Mistral with an MoE in every layer. Its checkpoints say block_sparse_moe and w1, w3, w2 for
gate, up, down.
"""

from __future__ import annotations

from minisgl.models.family import EXPERT_NAMES, LAYER_NAMES, Config, Family, MoESpec, never, window_everywhere
from minisgl.moe.base import RoutingRule


def _moe(config: Config) -> MoESpec:
    return MoESpec(
        num_experts=config["num_local_experts"],
        hidden_dim=config["intermediate_size"],
        rule=RoutingRule(top_k=config["num_experts_per_tok"], renormalize=True),
        sparse_layers=frozenset(range(config["num_hidden_layers"])),
    )


MIXTRAL = Family(
    "MixtralForCausalLM",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    qkv_bias=never,
    out_bias=never,
    mlp_bias=never,
    windows=window_everywhere,
    moe=_moe,
    layer_names={**LAYER_NAMES, "block_sparse_moe.gate.weight": "moe.router.weight"},
    expert_names={
        **EXPERT_NAMES,  # what transformers writes when asked not to restore the original layout
        "block_sparse_moe.experts.{}.w1.weight": "gate",
        "block_sparse_moe.experts.{}.w3.weight": "up",
        "block_sparse_moe.experts.{}.w2.weight": "down",
    },
)
