"""Attention over the paged KV cache: the contract (`base`), its backends, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    LayerCache,
)
from minisgl.attention.torch_sdpa import TorchAttention

__all__ = [
    "ATTENTION_NAMES",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionProblem",
    "LayerCache",
    "make_attention",
]

ATTENTION_NAMES = ("auto", "sdpa")

_MAKERS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": TorchAttention}


def make_attention(name: str, problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that serves the problem there: sdpa on a CPU,
    triton on CUDA.

    Layers that differ (a window here, none there) ask once each; backends hold scratch only, so one may serve
    all. Raises ValueError with the reason and the alternatives if the name is unknown or the backend cannot
    serve the problem.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(f"unknown attention backend {name!r}: use one of {', '.join(ATTENTION_NAMES)}")
    backend = _MAKERS["sdpa" if name == "auto" else name]()
    reason = backend.supports(problem, device)
    if reason is not None:
        raise ValueError(f"attention backend {name!r} cannot serve this model: {reason}")
    return backend
