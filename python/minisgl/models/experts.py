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
from minisgl.moe.exchange import Exchange, Local
from minisgl.moe.formats import get_format
from minisgl.moe.registry import make_backend
from minisgl.moe.store import ExpertStore, ResidentStore
from minisgl.moe.store.shard import ExpertShard, ExpertSpread
from minisgl.parallel import SOLO, Group

MoeFactory = Callable[[int, MoESpec], MoELayer]
"""Layer index and the model's MoE numbers -> that layer."""


def expert_shape(spec: ModelSpec, shard: ExpertShard | None = None) -> ExpertShape:
    """D, F and biases of one expert of an MoE model, or of a rank's part of it."""
    assert spec.moe is not None
    hidden_dim = spec.moe.hidden_dim if shard is None else shard.hidden.length
    return ExpertShape(spec.model_dim, hidden_dim, bias=spec.moe.expert_bias)


def build_moe_layer(
    spec: ModelSpec,
    store: ExpertStore,
    backend: MoeBackend,
    *,
    exchange: Exchange | None = None,
    shard: ExpertShard | None = None,
    group: Group = SOLO,
    device: torch.device,
    dtype: torch.dtype,
) -> MoELayer:
    """A layer with router and shared experts as the spec says, uninitialised, around the given parts.

    exchange, shard: which experts the store holds and how tokens reach the others; None where it holds all.
    group: the ranks that share the hidden dim of the shared experts.
    """
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
        mlp = GatedMLP(
            spec.model_dim, moe.shared_hidden_dim, moe.activation, device=device, dtype=dtype, group=group
        )
        shared = SharedExpert(
            mlp, gated=moe.shared_gate, model_dim=spec.model_dim, device=device, dtype=dtype
        )
    return MoELayer(
        router, store, backend, exchange=exchange, activation=moe.activation, shared=shared, shard=shard
    )


def expert_shard(spec: ModelSpec, spread: ExpertSpread | None, group: Group) -> ExpertShard:
    """What this rank's store holds: the experts that `spread` gives it, or, with None, its part of each one's F.

    Raises ValueError if F can't be shared evenly.
    """
    moe = spec.moe
    assert moe is not None
    if spread is not None:
        return spread.shard(group.rank, moe.hidden_dim)
    if moe.hidden_dim % group.size:
        raise ValueError(
            f"--tp={group.size} does not divide the experts' hidden dim {moe.hidden_dim}: use another number, or keep "
            f"experts whole with --expert-parallel-size {group.size}"
        )
    every = tuple(range(moe.num_experts))
    return ExpertShard(moe.num_experts, every, group.shard(moe.hidden_dim), adds_down_bias=group.rank == 0)


def resident_moe(
    spec: ModelSpec,
    *,
    backend: str = "auto",
    weight_format: str = "none",
    group_size: int = 128,
    device: torch.device,
    dtype: torch.dtype,
    group: Group = SOLO,
) -> MoeFactory:
    """The default factory: every expert on the device, one backend (and so one workspace) for all layers.

    group_size: of int4. The ranks of `group` share the hidden dim of every expert.
    """
    shared_backend = make_backend(backend, device)
    experts = get_format(weight_format, dtype, group_size)

    def build(layer: int, moe: MoESpec) -> MoELayer:
        shard = expert_shard(spec, None, group)
        store = ResidentStore(moe.num_experts, expert_shape(spec, shard), experts, device)
        exchange = Local(moe.num_experts, group)
        return build_moe_layer(
            spec,
            store,
            shared_backend,
            exchange=exchange,
            shard=shard,
            group=group,
            device=device,
            dtype=dtype,
        )

    return build
