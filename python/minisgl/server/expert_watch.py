"""What the live view and the metrics show of experts: how much each is used, which are in GPU memory, what their cache does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from minisgl.engine.engine import Engine
from minisgl.moe.store import CacheCounters, CacheView
from minisgl.moe.trace import RoutingTrace
from minisgl.server.ipc import ExpertMap

_FADE = 0.8  # share of an expert's heat that is left after one beat


class ExpertWatch:
    """Looks at the stores of all sparse layers between two steps.

    Heat comes from a routing trace, which it empties at each look, where there is one: that sees every route. Otherwise it
    comes from the caches, which see the steps that they plan: decoding. Without either there is no map.
    """

    def __init__(
        self,
        views: Sequence[Callable[[], CacheView | None]],
        held: Sequence[int],
        num_experts: int,
        trace: RoutingTrace | None,
        counters: Callable[[], Mapping[int, CacheCounters]],
    ):
        """views: one a sparse layer. held: global numbers of the experts that this rank's stores hold, in their order.
        counters: what each layer's cache did so far, none without caches.
        """
        self._views, self._held, self._trace, self._counters = views, list(held), trace, counters
        self._heat = np.zeros((len(views), num_experts))
        self._seen: np.ndarray | None = None  # uses at the last look

    @classmethod
    def of(cls, engine: Engine) -> ExpertWatch | None:
        """For one engine; None for a model without experts."""
        moe, layers = engine.spec.moe, list(engine.decoder.moe_layers().values())
        if moe is None or not layers:
            return None
        views, held = [layer.store.view for layer in layers], layers[0].shard.experts
        return cls(views, held, moe.num_experts, engine.trace, engine.expert_cache)

    def map(self) -> ExpertMap | None:
        """The map of the moment."""
        views = [view for look in self._views if (view := look()) is not None]
        if self._trace is None and not views:
            return None
        resident = np.ones(self._heat.shape, dtype=np.uint8)
        uses = np.zeros(self._heat.shape)
        if views:
            total, resident_here = _on_host(views)
            resident[:] = 0
            resident[:, self._held] = resident_here
            uses[:, self._held] = total - (total if self._seen is None else self._seen)
            self._seen = total
        if self._trace is not None:
            uses = self._trace.counts()
            self._trace.clear()
        self._heat = _FADE * self._heat + uses
        scaled = self._heat * (255.0 / max(self._heat.max(initial=0.0), 1.0))
        layers, experts = self._heat.shape
        return ExpertMap(layers, experts, scaled.astype(np.uint8).tobytes(), resident.tobytes())

    def numbers(self) -> dict[str, float]:
        """Totals of the caches of all layers, by the names that the metrics know; {} without caches."""
        layers = self._counters().values()
        if not layers:
            return {}
        total = sum(layers, CacheCounters())
        return {
            "expert_hits": total.hits,
            "expert_misses": total.misses,
            "expert_evictions": total.evictions,
            "link_bytes": total.num_bytes,
            "early_bytes": total.early_bytes,
            "useful_bytes": total.useful_bytes,
        }


def _on_host(views: Sequence[CacheView]) -> tuple[np.ndarray, np.ndarray]:
    """uses int64 [layers, E] and resident uint8 [layers, E], with one wait for the device."""
    uses = torch.stack([view.uses_E for view in views])
    resident = torch.stack([view.resident_E for view in views]).to(uses.dtype)
    both = torch.stack([uses, resident]).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.uint8)
