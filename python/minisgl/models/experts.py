"""From a model's numbers to its MoE layers: the parts that do not depend on where weights live or who
multiplies.

Who wants another store, format, backend or exchange writes a factory of its own around `build_moe_layer`; the
decoder only calls it once a sparse layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import MoELayer, Router, SharedExpert
from minisgl.models.family import MoESpec
from minisgl.models.spec import ModelSpec
from minisgl.moe.backend import MoeBackend
from minisgl.moe.base import ExpertShape
from minisgl.moe.exchange import Exchange
from minisgl.moe.formats import get_format
from minisgl.moe.registry import make_backend
from minisgl.moe.store import ExpertStore, ResidentStore

MoeFactory = Callable[[int, MoESpec], MoELayer]
"""Layer index and the model's MoE numbers -> that layer."""


def expert_shape(spec: ModelSpec) -> ExpertShape:
    """D, F and biases of one expert of an MoE model."""
    assert spec.moe is not None
    return ExpertShape(spec.model_dim, spec.moe.hidden_dim, bias=spec.moe.expert_bias)


def build_moe_layer(
    spec: ModelSpec,
    store: ExpertStore,
    backend: MoeBackend,
    *,
    exchange: Exchange | None = None,
    device: torch.device,
    dtype: torch.dtype,
) -> MoELayer:
    """A layer with router and shared experts as the spec says, uninitialised, around the given parts."""
    moe = spec.moe
    assert moe is not None
    router = Router(
        moe.num_experts,
        spec.model_dim,
        moe.rule,
        bias=moe.router_bias,
        choice_bias=moe.correction_bias,
        device=device,
        dtype=dtype,
    )
    shared = None
    if moe.shared_hidden_dim:
        mlp = GatedMLP(spec.model_dim, moe.shared_hidden_dim, moe.activation, device=device, dtype=dtype)
        shared = SharedExpert(
            mlp, gated=moe.shared_gate, model_dim=spec.model_dim, device=device, dtype=dtype
        )
    return MoELayer(router, store, backend, exchange=exchange, activation=moe.activation, shared=shared)


def resident_moe(
    spec: ModelSpec,
    *,
    backend: str = "auto",
    weight_format: str = "none",
    device: torch.device,
    dtype: torch.dtype,
) -> MoeFactory:
    """The default factory: every expert on the device, one backend (and so one workspace) for all layers."""
    shared_backend, experts = make_backend(backend, device), get_format(weight_format, dtype)

    def build(layer: int, moe: MoESpec) -> MoELayer:
        store = ResidentStore(moe.num_experts, expert_shape(spec), experts, device)
        return build_moe_layer(spec, store, shared_backend, device=device, dtype=dtype)

    return build
