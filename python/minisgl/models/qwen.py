"""Qwen2, Qwen3 and Qwen3-MoE.

Qwen2 has biases on q, k and v; Qwen3 replaced them by an RMSNorm on each head's q and k. A window counts
only when use_sliding_window says so: in the dense models from layer max_window_layers on, in the MoE on all
layers.
"""

from __future__ import annotations

from minisgl.models.family import Config, Family, MoESpec, always, full_attention, never, window_everywhere
from minisgl.moe.base import RoutingRule


def _windows_by_layer(config: Config) -> tuple[int | None, ...]:
    if not config.get("use_sliding_window"):
        return full_attention(config)
    window, num_layers = config.get("sliding_window"), config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= config["max_window_layers"] else None for i in range(num_layers))
    if len(kinds) != num_layers:
        raise ValueError(f"config.json lists {len(kinds)} layer_types for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows_if_used(config: Config) -> tuple[int | None, ...]:
    return window_everywhere(config) if config.get("use_sliding_window") else full_attention(config)


def _moe(config: Config) -> MoESpec:
    """A layer is sparse unless listed in mlp_only_layers or skipped by decoder_sparse_step."""
    num_experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    dense, step = set(config.get("mlp_only_layers") or ()), config["decoder_sparse_step"]
    sparse = frozenset(
        i
        for i in range(config["num_hidden_layers"])
        if num_experts > 0 and i not in dense and (i + 1) % step == 0
    )
    rule = RoutingRule(top_k=config["num_experts_per_tok"], renormalize=bool(config["norm_topk_prob"]))
    return MoESpec(num_experts, config["moe_intermediate_size"], rule, sparse)


QWEN2 = Family(
    "Qwen2ForCausalLM",
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    qkv_bias=always,
    out_bias=never,
    mlp_bias=never,
    windows=_windows_by_layer,
)

QWEN3 = Family(
    "Qwen3ForCausalLM",
    defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    mlp_bias=never,
    qk_norm=True,
    windows=_windows_by_layer,
)

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    defaults={"sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False},
    mlp_bias=never,
    qk_norm=True,
    windows=_windows_if_used,
    moe=_moe,
)
