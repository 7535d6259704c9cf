"""Attention over the paged KV cache: the contract (`base`), its backends, and the choice among them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from minisgl.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    LayerCache,
)
from minisgl.attention.flashinfer import FlashInferAttention
from minisgl.attention.mixed import MixedAttention
from minisgl.attention.torch_sdpa import TorchAttention

__all__ = [
    "ATTENTION_NAMES",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionProblem",
    "LayerCache",
    "make_attention",
]

ATTENTION_NAMES = ("auto", "sdpa", "triton", "flashinfer")

_MAKERS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": TorchAttention,
    "flashinfer": FlashInferAttention,
}
_MISSING: dict[str, str] = {}

# Triton exists on Linux only; everything else must still import.
if importlib.util.find_spec("triton"):
    from minisgl.attention.triton_paged import TritonAttention

    _MAKERS["triton"] = TritonAttention
    # FlashInfer plans on the host, which no CUDA graph can hold: decode steps are triton's.
    _MAKERS["flashinfer"] = lambda: MixedAttention(FlashInferAttention(), TritonAttention())
else:
    _MISSING["triton"] = "Triton is not installed (pip install triton, Linux only)"


def make_attention(name: str, problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    """The backend called `name`; "auto" is triton on CUDA where it can serve the problem, else sdpa.

    Layers that differ (a window here, none there) ask once each; backends hold scratch only, so one may serve all.
    Raises ValueError with the reason and the alternatives if the name is unknown or the backend cannot serve the problem.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(f"unknown attention backend {name!r}: use one of {', '.join(ATTENTION_NAMES)}")
    if name != "auto":
        reason = _reason_against(name, problem, device)
        if reason is None:
            return _MAKERS[name]()
        raise ValueError(
            f"attention backend {name!r} cannot be used: {reason}. "
            f"Alternatives: {', '.join(n for n in ATTENTION_NAMES if n != name)}"
        )
    for candidate in ("triton", "sdpa") if device.type == "cuda" else ("sdpa",):
        if _reason_against(candidate, problem, device) is None:
            return _MAKERS[candidate]()
    raise ValueError(f"no attention backend can be used: {_reason_against('sdpa', problem, device)}")


def _reason_against(name: str, problem: AttentionProblem, device: torch.device) -> str | None:
    """None if the backend called `name` can serve the problem there, else why not."""
    return _MISSING.get(name) or _MAKERS[name]().supports(problem, device)
