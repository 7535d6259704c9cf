"""What one model family is: how its config.json deviates from the common reading, and what its tensors are
called.

A family is data and two small readers, never a class with a forward: one decoder serves all of them. The
common names are those of Llama's checkpoints, which nearly every family kept; a family lists only what it
calls differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl.moe.base import Activation, RoutingRule

Config = Mapping[str, Any]
"""config.json as a dictionary, with the family's defaults filled in."""


@dataclass(frozen=True)
class MoESpec:
    """The numbers of a model's MoE layers.

    num_experts E and hidden_dim F of one expert; rule decides ids and weights; sparse_layers: indices of
    the layers that are MoE (the others are dense). activation joins gate and up.
    shared_hidden_dim: width of the shared experts seen as one dense MLP, 0 if there are none; shared_gate:
    a sigmoid gate scales their output (Qwen2-MoE). router_bias: added to the logits (gpt-oss).
    correction_bias: added to the scores for the choice only (DeepSeek-V3). expert_bias: experts carry
    gate_up and down biases (gpt-oss).
    """

    num_experts: int
    hidden_dim: int
    rule: RoutingRule
    sparse_layers: frozenset[int]
    activation: Activation = "silu"
    shared_hidden_dim: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    expert_bias: bool = False


TOP_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Checkpoint name -> our name, outside the layers."""

LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "self_attn.q_proj.weight": "attention.q.weight",
    "self_attn.k_proj.weight": "attention.k.weight",
    "self_attn.v_proj.weight": "attention.v.weight",
    "self_attn.o_proj.weight": "attention.out.weight",
    "self_attn.q_proj.bias": "attention.q.bias",
    "self_attn.k_proj.bias": "attention.k.bias",
    "self_attn.v_proj.bias": "attention.v.bias",
    "self_attn.o_proj.bias": "attention.out.bias",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
    "mlp.gate_proj.bias": "mlp.gate.bias",
    "mlp.up_proj.bias": "mlp.up.bias",
    "mlp.down_proj.bias": "mlp.down.bias",
    "mlp.gate.weight": "moe.router.weight",
}
"""Checkpoint name behind `model.layers.N.` -> our name behind `layers.N.`."""

EXPERT_NAMES: Mapping[str, str] = {
    "mlp.experts.{}.gate_proj.weight": "gate",
    "mlp.experts.{}.up_proj.weight": "up",
    "mlp.experts.{}.down_proj.weight": "down",
    "mlp.experts.gate_up_proj": "gate_up",
    "mlp.experts.down_proj": "down",
}
"""Checkpoint name behind `model.layers.N.` -> part of an expert; {} is the expert, a name without it holds
all of them [E, ...].
"""


@dataclass(frozen=True)
class Arrangement:
    """How a family's unquantized expert tensors lie on disk, where that is not [N, K] with the rows of gate before those of up.

    transposed: [K, N]. interleaved: outputs of gate and up alternate, in weights and biases (gpt-oss).
    """

    transposed: bool = False
    interleaved: bool = False

    def undo(self, tensor: torch.Tensor, part: str) -> torch.Tensor:
        """One expert's tensor `part` ("gate_up", "down", or these with _bias) as the engine has it."""
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        if self.interleaved and part.startswith("gate_up"):
            tensor = torch.cat((tensor[::2], tensor[1::2]))
        return tensor


@dataclass(frozen=True)
class Family:
    """Deviations of one architecture. Everything not said here is read the common way.

    defaults: values of keys that config.json may lack, as Hugging Face assumes them.
    qkv_bias, out_bias, mlp_bias: whether the projections have biases, from the config. qk_norm: RMSNorm on
    each head's q and k.
    windows: sliding window of every layer (None: full attention). moe: the MoE numbers, None for a dense
    model.
    sinks: a learned logit a head joins attention's softmax. layer_names, expert_names: complete tables; build them from the
    common ones. arrangement: of expert tensors, None for the common one.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias"))
    out_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias"))
    mlp_bias: Callable[[Config], bool] = lambda config: bool(config.get("mlp_bias"))
    qk_norm: bool = False
    sinks: bool = False
    windows: Callable[[Config], tuple[int | None, ...]] = lambda config: full_attention(config)
    moe: Callable[[Config], MoESpec] | None = None
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    expert_names: Mapping[str, str] = field(default_factory=lambda: EXPERT_NAMES)
    arrangement: Arrangement | None = None


def full_attention(config: Config) -> tuple[int | None, ...]:
    """No layer has a window."""
    return (None,) * config["num_hidden_layers"]


def window_everywhere(config: Config) -> tuple[int | None, ...]:
    """Every layer has the window `sliding_window`, which may be null."""
    return (config.get("sliding_window"),) * config["num_hidden_layers"]


def never(config: Config) -> bool:
    """For a projection that has no bias whatever the config says."""
    return False


def always(config: Config) -> bool:
    """For a projection that always has a bias."""
    return True
