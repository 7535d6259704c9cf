"""Experts in host memory: how many slots a layer gets, how much of the host is pinned, and the stores that share it.

    size_cache       before anything is loaded: slots a layer, as a number in the configuration
    ExpertOffload    host memory and copy stream of one engine, and its stores; `close` unpins

A layer does not know any of this: it is given a store.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from minisgl.config import Decision, EngineConfig, OffloadConfig
from minisgl.engine.memory import GIB, DoesNotFit, predict_ledger, setup_of
from minisgl.models.sizes import ModelSizes
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store import CacheCounters, StagedStore, StoreBytes
from minisgl.moe.store.copies import Copies, CopyChannel, CudaCopies, DirectCopies
from minisgl.moe.store.pinned import CudaPinning, HostFacts, HostMemory, pin_budget

logger = logging.getLogger(__name__)


def size_cache(
    config: EngineConfig, sizes: ModelSizes, device_budget: int | None
) -> tuple[EngineConfig, list[Decision]]:
    """The configuration with a number for --moe-expert-cache-size, and why.

    config: resolved. device_budget: bytes the engine may allocate on its CUDA device, None on a CPU, where slots are only a
    second place in the same memory. Raises ValueError for a model without experts, DoesNotFit where not one slot a layer is
    left.
    """
    if sizes.expert is None:
        raise ValueError(
            "--moe-expert-offload: this model has no experts; leave it out (`minisgl plan` says what fits)"
        )
    asked, everything = config.offload.num_slots, sizes.num_experts
    if asked is not None and asked <= everything:
        slots, reason = asked, ""
    elif asked is not None:
        slots, reason = everything, f"the model has {everything} experts a layer, so {asked} would be empty"
    elif device_budget is None:
        slots = min(everything, max(2 * sizes.top_k, everything // 4))
        reason = "a quarter of the experts, at least 2 x top-k: on a CPU it saves no memory"
    else:
        slots = _slots_that_fit(config, sizes, device_budget)
        reason = f"what {device_budget / GIB:.1f} GiB leave beside everything else"
    if slots < min(2 * sizes.top_k, everything):
        logger.warning(
            "%d slots a layer are fewer than 2 x top-k (%d): experts will leave before they are used again; give more with "
            "--moe-expert-cache-size, or quantize with --moe-expert-quantization",
            slots,
            2 * sizes.top_k,
        )
    offload = dataclasses.replace(config.offload, moe_expert_cache_size=str(slots))
    decisions = [Decision("--moe-expert-cache-size", str(slots), reason)] if reason else []
    return dataclasses.replace(config, offload=offload), decisions


def _slots_that_fit(config: EngineConfig, sizes: ModelSizes, budget: int) -> int:
    cache = config.cache
    tokens = cache.max_total_tokens if cache.max_total_tokens is not None else 2 * cache.page_size
    ledger = predict_ledger(sizes, setup_of(config, pages_for(tokens, cache.page_size)))
    others = ledger.on("device") - ledger.line("experts")
    kernel = config.kernel
    record = sizes.record_bytes(
        kernel.moe_expert_quantization,
        getattr(torch, config.model.dtype),
        kernel.moe_quantization_group_size,
    )
    slot = record * sizes.num_sparse
    slots = min((budget - others) // slot, sizes.num_experts)
    if slots < 1:
        raise DoesNotFit(
            f"not one expert a layer fits: of {budget / GIB:.2f} GiB everything else takes {others / GIB:.2f} and a slot in "
            f"every layer {slot / GIB:.2f}. Lower --max-total-tokens, --max-prefill-length or --max-running-requests, or "
            "quantize with --moe-expert-quantization",
            others + slot,
            budget,
            ledger,
        )
    return slots


def pages_for(num_tokens: int, page_size: int) -> int:
    """KV pages that hold so many tokens, with the dummy page."""
    return -(-num_tokens // page_size) + 1


class ExpertOffload:
    """What the stores of one engine share. decisions: what was pinned, and why not all.

    Raises ValueError if the host can't hold the experts.
    """

    def __init__(
        self,
        config: OffloadConfig,
        sizes: ModelSizes,
        record_bytes: int,
        device: torch.device,
        facts: HostFacts,
    ) -> None:
        """config: with a number of slots (`size_cache`). record_bytes: of one expert. facts: of the host."""
        assert config.num_slots is not None
        self.num_slots, self.device = config.num_slots, device
        self.decisions: list[Decision] = []
        self._wave_size, self._num_experts, self._record_bytes = (
            config.moe_expert_offload_wave_size,
            sizes.num_experts,
            record_bytes,
        )
        wanted = record_bytes * sizes.num_experts * sizes.num_sparse
        if wanted > facts.available:
            raise ValueError(
                f"--moe-expert-offload: the experts take {wanted / GIB:.1f} GiB of host memory and "
                f"{facts.available / GIB:.1f} GiB are available; quantize with --moe-expert-quantization, or free some"
            )
        self._channel: CopyChannel | None = None
        self._memory = HostMemory()
        self._pinned_a_layer = 0
        if device.type == "cuda":
            self._pin(wanted, facts, sizes.num_sparse)

    def _pin(self, wanted: int, facts: HostFacts, num_layers: int) -> None:
        """Set up pinning and the copy stream. Layers share the budget evenly; the ring gets its part first."""
        budget, reason = pin_budget(wanted, facts)
        ring = min(2 * self._wave_size, self.num_slots)
        self._memory = HostMemory(CudaPinning(), budget)
        self._channel = CopyChannel(self.device, self._memory, ring, self._record_bytes)
        self._pinned_a_layer = self._memory.budget // num_layers // self._record_bytes
        if reason:
            share = self._pinned_a_layer / self._num_experts
            self.decisions.append(Decision("--moe-expert-offload", f"{share:.0%} pinned", reason))

    def store(self, shape: ExpertShape, weight_format: ExpertFormat) -> StagedStore:
        """The store of one more layer."""
        host = self._memory.allocate(self._num_experts, self._record_bytes, self._pinned_a_layer)
        if self._memory.refusal and not any(d.reason == self._memory.refusal for d in self.decisions):
            self.decisions.append(Decision("--moe-expert-offload", "partly pinned", self._memory.refusal))
        return StagedStore(
            host, shape, weight_format, self.num_slots, self.device, self._copies, self._wave_size
        )

    def _copies(self, slab_SB: torch.Tensor) -> Copies:
        return DirectCopies(slab_SB) if self._channel is None else CudaCopies(self._channel, slab_SB)

    def bytes(self) -> StoreBytes:
        """What no single store owns: the ring."""
        return StoreBytes(pinned=self._channel.num_bytes if self._channel is not None else 0)

    def close(self) -> None:
        """Wait for what is under way and unpin all host memory. No step may follow."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._memory.close()


def cache_report(counters: CacheCounters, num_slots: int | None) -> str:
    """One line for people. num_slots: a layer, as resolved."""
    needed = counters.hits + counters.misses
    return (
        f"expert cache: {counters.hit_rate:.1%} of {needed:,} experts were in one of {num_slots} slots a layer, "
        f"{counters.num_bytes / 1e6:,.1f} MB copied"
    )
