"""From flags to MoE layers: which store, format and backend every sparse layer of a model gets."""

from __future__ import annotations

import torch

from minisgl.config import KernelConfig
from minisgl.engine.offload import ExpertOffload
from minisgl.layers.moe import MoELayer
from minisgl.models.experts import MoeFactory, build_moe_layer, expert_shape
from minisgl.models.family import MoESpec
from minisgl.models.spec import ModelSpec
from minisgl.moe.formats import get_format
from minisgl.moe.registry import make_backend
from minisgl.moe.store import ResidentStore


def make_moe_factory(
    spec: ModelSpec,
    kernel: KernelConfig,
    device: torch.device,
    dtype: torch.dtype,
    offload: ExpertOffload | None = None,
) -> MoeFactory:
    """Experts in the format the flags name, all layers on one backend and so on one workspace.

    offload: where experts live that are not all on the device; None keeps them there.

    Raises ValueError where the format cannot hold this model's experts or the backend cannot compute them.
    """
    threshold = kernel.moe_small_m_threshold
    backend = make_backend(
        kernel.moe_backend,
        device,
        small_m_threshold="auto" if threshold == "auto" else int(threshold),
        workspace_cache=not kernel.disable_moe_workspace_cache,
    )
    weight_format = get_format(
        kernel.moe_expert_quantization, dtype, group_size=kernel.moe_quantization_group_size
    )

    def build(layer: int, moe: MoESpec) -> MoELayer:
        shape = expert_shape(spec)
        if offload is None:
            store = ResidentStore(moe.num_experts, shape, weight_format, device)
        else:
            store = offload.store(shape, weight_format)
        return build_moe_layer(spec, store, backend, device=device, dtype=dtype)

    return build
