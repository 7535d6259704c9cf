"""Contract of an expert store: where the weights of one layer live, and how they come to be served from
slots.

Loading: the loader hands tensors to `sink` as it meets them, in any order; the store quantizes them with its
format and writes them to their final place, so no second copy of the model exists. `missing` says what never
came.
Serving: `place` turns a routing into waves. A resident store has one (slot = expert); one with fewer slots
than experts may need several. The layer never learns which kind it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Protocol

import torch

from minisgl.moe.base import ExpertShape, Placement, Routing
from minisgl.moe.formats import ExpertFormat

Guess = Callable[[], torch.Tensor]
"""int32 [T, K]: experts that the following layer's tokens will probably use, the likeliest first, -1 for none."""


@dataclass(frozen=True)
class StoreBytes:
    """What a store occupies, in bytes: device memory, page-locked host memory, ordinary host memory."""

    device: int = 0
    pinned: int = 0
    host: int = 0


@dataclass(frozen=True)
class CacheCounters:
    """What a cache of experts did since the start. An expert that several tokens of a step use counts once in that step.

    hits: experts that were in a slot when a step needed them; misses: those that were not. evictions: experts that left a slot
    for another. num_bytes: copied from host memory; early_bytes: those of them that were fetched on a guess; useful_bytes:
    those of these that a step then needed. early_off: layers whose guesses did not pay and stopped.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    num_bytes: int = 0
    early_bytes: int = 0
    useful_bytes: int = 0
    early_off: int = 0

    @property
    def hit_rate(self) -> float:
        """0 before anything was needed."""
        return self.hits / max(self.hits + self.misses, 1)

    def __add__(self, other: CacheCounters) -> CacheCounters:
        return CacheCounters(*(one + two for one, two in zip(astuple(self), astuple(other))))

    def __sub__(self, other: CacheCounters) -> CacheCounters:
        return CacheCounters(*(one - two for one, two in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class CacheView:
    """A cache of experts at this moment: uses_E int [E], how often steps that the cache planned used each expert so far, and
    resident_E bool [E], whether it is in a slot. Valid until the next step.
    """

    uses_E: torch.Tensor
    resident_E: torch.Tensor


class ExpertStore(Protocol):
    """The experts of one layer on this rank."""

    num_experts: int
    shape: ExpertShape
    format: ExpertFormat
    device: torch.device
    """Where the slabs are, which is where kernels run."""

    @property
    def num_slots(self) -> int:
        """S of the slabs that `place` hands out."""
        ...

    def sink(self, expert: int | None, name: str, tensor: torch.Tensor) -> None:
        """Take one unquantized tensor of a checkpoint, on any device, in any float dtype.

        expert: its number, or None for all of them in one tensor with a leading E.
        name: "gate" or "up" [F, D], "gate_up" [2F, D], "down" [D, F]; with `_bias` [F], [2F] or [D].
        Raises ValueError with name, expected and found shape.
        """
        ...

    def sink_parts(self, expert: int | None, parts: Mapping[str, torch.Tensor]) -> None:
        """Take stored parts as the format has them, e.g. {"gate": fp8, "gate_scale": float32}: bits are kept.

        A scale of one number an output channel may come as [N], [N, 1], [1] or [], after a leading E if any.
        Raises ValueError for a part the format doesn't have, and for a wrong shape or dtype.
        """
        ...

    def fill_random(self, seed: int, std: float = 0.02) -> None:
        """Valid weights without a checkpoint: normal values of deviation `std`, then the format's
        quantization.
        """
        ...

    def missing(self) -> list[str]:
        """What never reached `sink`, e.g. "expert 3: down"; empty when the layer can be served."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """What is stored for "gate_up" [E, 2F, D] or "down" [E, D, F], as float32: for reading and comparing."""
        ...

    def place(self, routing: Routing, awaits: bool = False, may_wait: bool = False) -> Iterable[Placement]:
        """Waves that together serve every route once whose id is not -1. Each is valid until the next is
        asked for. awaits: whether a wave may have an `arrival`. may_wait: whether the step isn't one that a CUDA graph holds,
        so that the store may wait for the device where that serves its cache better.
        """
        ...

    def expect(self, guess: Guess) -> None:
        """Before `place`, which may call it once, on another stream, while it serves its waves: to fetch for the following
        layer what is not at hand. Stores that fetch nothing early leave it alone.
        """
        ...

    def bytes(self) -> StoreBytes:
        """For the memory ledger."""
        ...

    def graph_safe(self, num_tokens: int) -> bool:
        """Whether `place` for this many tokens can be held by a CUDA graph: always the same number of waves,
        and no wait for the device.
        """
        ...

    def counters(self) -> CacheCounters | None:
        """What happened so far, which may wait for the device; None where every expert has its own slot."""
        ...

    def view(self) -> CacheView | None:
        """What is where, without waiting; None where every expert has its own slot."""
        ...
