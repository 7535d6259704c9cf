"""What machine and model are: the facts that `resolve.resolve` decides by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from minisgl.attention.choice import fastest
from minisgl.layers.fp8 import FP8_CAPABILITY
from minisgl.models.checkpoints import stored_experts
from minisgl.models.dense import stored_group
from minisgl.models.experts import expert_shape
from minisgl.models.spec import ModelSpec
from minisgl.moe.exchange.choice import fastest as fastest_dispatch
from minisgl.resolve import Facts


def gather_facts(spec: ModelSpec, folder: Path, num_ranks: int = 1) -> Facts:
    """What this machine and this model are, for `resolve.resolve`. num_ranks: that will share the model."""
    has_cuda = torch.cuda.is_available()
    experts = stored_experts(folder, expert_shape(spec)) if spec.moe is not None else None
    facts = Facts(
        has_cuda=has_cuda,
        has_bf16=has_cuda and torch.cuda.get_device_capability()[0] >= 8,
        checkpoint_dtype=str(spec.dtype).removeprefix("torch."),
        context_length=spec.context_length,
        expert_format="none" if experts is None else experts.name,
        expert_group_size=128 if experts is None else experts.group_size,
        dense_group=stored_group(folder),
        has_fp8=has_cuda and torch.cuda.get_device_capability() >= FP8_CAPABILITY,
    )
    if not has_cuda:
        return facts
    return replace(
        facts,
        device_bytes=torch.cuda.get_device_properties(0).total_memory,
        vocab_size=spec.vocab_size,
        dispatch=fastest_dispatch(torch.cuda.get_device_name(), num_ranks),
        attention=fastest(torch.cuda.get_device_name(), spec.head_dim, spec.sinks),
    )
