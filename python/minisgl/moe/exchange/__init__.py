"""Where tokens go: base.py is the contract; local.py stays here, reduce.py and all_to_all.py connect ranks."""

from __future__ import annotations

import torch

from minisgl.moe.exchange.all_to_all import AllToAll
from minisgl.moe.exchange.base import Dispatched, Exchange, Rows
from minisgl.moe.exchange.local import Local
from minisgl.moe.exchange.reduce import Reduce
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import Group

__all__ = ["DISPATCHES", "AllToAll", "Dispatched", "Exchange", "Local", "Reduce", "Rows", "make_exchange"]

DISPATCHES = ("reduce", "dynamic", "static")


def make_exchange(
    dispatch: str, spread: ExpertSpread, group: Group, device: torch.device, overlap: bool = True
) -> Exchange:
    """The exchange named by a resolved --moe-ep-dispatch; what auto means says `choice.fastest`."""
    if dispatch == "reduce":
        return Reduce(spread, group, device)
    if dispatch in ("dynamic", "static"):
        return AllToAll(spread, group, device, static=dispatch == "static", overlap=overlap)
    raise ValueError(f"--moe-ep-dispatch={dispatch!r} is unknown: use one of {', '.join(DISPATCHES)}")
