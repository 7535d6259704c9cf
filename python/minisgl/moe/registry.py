"""MoE backends by the name that `--moe-backend` takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.moe.backend import MoeBackend
from minisgl.moe.base import Problem
from minisgl.moe.select import DeviceLimits, Record, Threshold
from minisgl.moe.torch_backend import TorchMoeBackend

try:
    from minisgl.moe.autotune import Tuner
    from minisgl.moe.fused import FusedMoeBackend
    from minisgl.moe.records import Records
except (
    ModuleNotFoundError
) as error:  # Triton is not made for every platform, and the torch backend needs none
    if error.name != "triton":
        raise
    FusedMoeBackend = Tuner = Records = None

moe_backend_choices = ("auto", "fused", "torch")


def make_backend(
    name: str,
    device: torch.device | str,
    *,
    small_m_threshold: Threshold = "auto",
    workspace_cache: bool = True,
    records: Callable[[Problem, DeviceLimits], Record | None] | None = None,
    autotune: bool = False,
) -> MoeBackend:
    """name: "torch", "fused", or "auto": fused on a CUDA device with Triton, else torch.

    autotune: measure shapes without a record on their first step, and keep what won in the user's cache folder. The other
    arguments are those of FusedMoeBackend; the torch backend has nothing to set. One backend owns one workspace, so an
    engine makes one for all of its layers. Raises ValueError for an unknown name, and for "fused" without Triton.
    """
    if name not in moe_backend_choices:
        raise ValueError(f"unknown MoE backend {name!r}: choose one of {', '.join(moe_backend_choices)}")
    if name == "auto":
        name = "fused" if torch.device(device).type == "cuda" and FusedMoeBackend is not None else "torch"
    if name == "torch":
        return TorchMoeBackend()
    if FusedMoeBackend is None:
        raise ValueError("the fused MoE backend needs Triton, which isn't installed: use --moe-backend torch")
    tuner = None
    if autotune and Tuner is not None and Records is not None and torch.device(device).type == "cuda":
        tuner = Tuner(DeviceLimits.of(torch.device(device)), Records(Records.default_folder()))
    return FusedMoeBackend(
        small_m_threshold=small_m_threshold, workspace_cache=workspace_cache, records=records, tuner=tuner
    )
