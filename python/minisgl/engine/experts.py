"""From flags to MoE layers: which store, format and backend every sparse layer of a model gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.config import KernelConfig, ParallelConfig
from minisgl.engine.offload import ExpertOffload
from minisgl.layers.attention import Heads
from minisgl.layers.mlp import check_width
from minisgl.layers.moe import MoELayer
from minisgl.models.experts import MoeFactory, build_moe_layer, expert_shape, expert_shard
from minisgl.models.family import MoESpec
from minisgl.models.spec import ModelSpec
from minisgl.moe.exchange import Exchange, Local, make_exchange
from minisgl.moe.formats import get_format
from minisgl.moe.registry import make_backend
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.shard import ExpertShard, ExpertSpread
from minisgl.parallel import Group, PlannedGroup


@dataclass(frozen=True)
class ExpertSharing:
    """What of every MoE layer this rank holds, and how its tokens meet the rest; one for all layers."""

    shard: ExpertShard
    exchange: Exchange
    group: Group


def share_experts(
    spec: ModelSpec, parallel: ParallelConfig, group: Group, device: torch.device
) -> ExpertSharing | None:
    """From flags to a rank's share of the experts; None for a model without any.

    Raises ValueError, with the remedy, where the ranks can't share them as asked.
    """
    if spec.moe is None:
        if parallel.expert_parallel_size > 1:
            raise ValueError(
                f"--expert-parallel-size={parallel.expert_parallel_size}: this model has no experts; leave it out"
            )
        return None
    num_experts = spec.moe.num_experts
    if parallel.expert_parallel_size == 1:
        return ExpertSharing(expert_shard(spec, None, group), Local(num_experts, group), group)
    kind = "round-robin" if parallel.moe_expert_placement == "round-robin" else "contiguous"
    spread = ExpertSpread(num_experts, group.size, kind, parallel.moe_replicated_experts)
    overlap = not parallel.disable_moe_communication_overlap
    exchange = make_exchange(parallel.moe_ep_dispatch, spread, group, device, overlap)
    return ExpertSharing(expert_shard(spec, spread, group), exchange, group)


def check_can_share(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Raise ValueError, with the remedy, if the ranks asked for can't share this model; before any of them is started."""
    group = PlannedGroup(parallel.tensor_parallel_size)
    Heads.share(spec.num_heads, spec.num_kv_heads, group)
    share_experts(spec, parallel, group, torch.device("cpu"))
    dense = spec.moe is None or len(spec.moe.sparse_layers) < spec.num_layers
    widths = (spec.hidden_dim if dense else 0, spec.moe.shared_hidden_dim if spec.moe is not None else 0)
    for width in widths:
        check_width(width, group)


def make_moe_factory(
    spec: ModelSpec,
    kernel: KernelConfig,
    device: torch.device,
    dtype: torch.dtype,
    sharing: ExpertSharing,
    offload: ExpertOffload | None = None,
) -> MoeFactory:
    """Experts in the format the flags name, all layers on one backend and so on one workspace.

    sharing: which part of them this rank holds. offload: where experts live that are not all on the device; None keeps
    them there.

    Raises ValueError where the format cannot hold this model's experts or the backend cannot compute them.
    """
    threshold = kernel.moe_small_m_threshold
    backend = make_backend(
        kernel.moe_backend,
        device,
        small_m_threshold="auto" if threshold == "auto" else int(threshold),
        workspace_cache=not kernel.disable_moe_workspace_cache,
        autotune=kernel.moe_autotune,
    )
    weight_format = get_format(
        kernel.moe_expert_quantization, dtype, group_size=kernel.moe_quantization_group_size
    )

    built: list[MoELayer] = []

    def build(layer: int, moe: MoESpec) -> MoELayer:
        shard = sharing.shard
        shape = expert_shape(spec, shard)
        if offload is None:
            store = ResidentStore(len(shard.experts), shape, weight_format, device)
        else:
            store = offload.store(shape, weight_format)
        made = build_moe_layer(
            spec,
            store,
            backend,
            exchange=sharing.exchange,
            shard=shard,
            group=sharing.group,
            device=device,
            dtype=dtype,
        )
        if offload is not None and offload.prefetches and built:
            built[-1].guess_with(made)
        built.append(made)
        return made

    return build
