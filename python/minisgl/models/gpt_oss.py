"""gpt-oss: MoE in every layer, biases everywhere, a sink a head, and a window in every other layer.

Experts come as mxfp4 (`checkpoints.mxfp4`), or, in copies that were dequantized, as [E, K, N]; rows of gate and up alternate in
both, and in the biases.
"""

from __future__ import annotations

from minisgl.models.family import LAYER_NAMES, Arrangement, Config, Family, MoESpec, never
from minisgl.moe.base import RoutingRule

SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the numbers of the activation


def _moe(config: Config) -> MoESpec:
    for key, served in SWIGLU.items():
        if float(config.get(key, served)) != served:
            raise ValueError(f"config.json: {key} {config[key]} is not served, only {served}")
    return MoESpec(
        num_experts=config["num_local_experts"],
        hidden_dim=config["intermediate_size"],
        rule=RoutingRule(top_k=config["num_experts_per_tok"], scoring="softmax_of_topk"),
        sparse_layers=frozenset(range(config["num_hidden_layers"])),
        activation="gpt_oss",
        router_bias=True,
        expert_bias=True,
    )


def _windows(config: Config) -> tuple[int | None, ...]:
    """Every other layer, the first one included, unless layer_types says which."""
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * num_layers
    if len(kinds) < num_layers:
        raise ValueError(f"config.json lists {len(kinds)} layer_types for {num_layers} layers")
    return tuple(
        config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds[:num_layers]
    )


GPT_OSS = Family(
    "GptOssForCausalLM",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "attention_bias": True, "sliding_window": 128},
    mlp_bias=never,
    sinks=True,
    windows=_windows,
    moe=_moe,
    layer_names={
        **LAYER_NAMES,
        "self_attn.sinks": "attention.sinks",
        "mlp.router.weight": "moe.router.weight",
        "mlp.router.bias": "moe.router.bias",
    },
    expert_names={
        "mlp.experts.gate_up_proj": "gate_up",
        "mlp.experts.gate_up_proj_bias": "gate_up_bias",
        "mlp.experts.down_proj": "down",
        "mlp.experts.down_proj_bias": "down_bias",
    },
    arrangement=Arrangement(transposed=True, interleaved=True),
)
