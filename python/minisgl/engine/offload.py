"""Experts in host memory: how many slots a layer gets, how much of the host is pinned, and the stores that share it.

    size_cache       before anything is loaded: slots a layer, as a number in the configuration
    ExpertOffload    host memory and copy stream of one engine, and its stores; `close` unpins

A layer does not know any of this: it is given a store.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Mapping

import torch
from rich.table import Table

from minisgl.config import STEP_TOKENS, EngineConfig, OffloadConfig
from minisgl.engine.memory import (
    GIB,
    DoesNotFit,
    Setup,
    expert_cache_bytes,
    num_ring_records,
    num_transient_slots,
    predict_ledger,
    setup_of,
)
from minisgl.models.sizes import ModelSizes
from minisgl.moe.base import ExpertShape, Slab
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store import CacheCounters, ExpertStore, StagedStore, StoreBytes
from minisgl.moe.store.copies import Copies, CopyChannel, CudaCopies, DirectCopies
from minisgl.moe.store.overlap import Forked, Overlap, Serial
from minisgl.moe.store.pinned import HostFacts, HostMemory, Pinning, pin_budget
from minisgl.moe.store.streaming import TransientSlots
from minisgl.resolve import Decision

try:
    from minisgl.moe.store.device_cache import DeviceStore
except ModuleNotFoundError as error:  # Triton is not made for every platform, and the staged store needs none
    if error.name != "triton":
        raise
    DeviceStore = None

logger = logging.getLogger(__name__)

STEPS = (STEP_TOKENS, 4096, 2048, 1024, 512)  # lengths to try for --max-prefill-length
FLOP_PER_LINK_BYTE = (
    2000  # 50 TFLOP/s behind PCIe 4 x16, 25 GB/s: the least of the cards that people offload on
)


def size_cache(
    config: EngineConfig, sizes: ModelSizes, device_budget: int | None
) -> tuple[EngineConfig, list[Decision]]:
    """The configuration with a number for --moe-expert-cache-size, and why; without offload if every expert gets a slot.

    config: resolved. device_budget: bytes the engine may allocate on its CUDA device, None on a CPU, where slots are only a
    second place in the same memory. Raises ValueError for a model without experts, DoesNotFit where not one slot a layer is
    left.
    """
    if sizes.expert is None:
        raise ValueError(
            "--moe-expert-offload: this model has no experts; leave it out (`minisgl plan` says what fits)"
        )
    config, decisions = size_step(config, sizes, device_budget)
    asked, everything = config.offload.num_slots, sizes.num_experts
    if asked is not None:
        slots, reason = min(asked, everything), ""
    elif device_budget is None:
        slots = min(everything, max(2 * sizes.top_k, everything // 4))
        reason = "a quarter of the experts, at least 2 x top-k: on a CPU it saves no memory"
    else:
        slots = _slots_that_fit(config, sizes, device_budget)
        reason = f"what {device_budget / GIB:.1f} GiB leave beside everything else"
    if slots == everything:
        unused = dataclasses.replace(
            config.offload,
            moe_expert_offload=False,
            moe_expert_cache_size="auto",
            moe_offload_mode="auto",
            moe_prefetch=False,
        )
        reason = f"all {everything} experts of a layer fit on the device: they stay there, and none is copied"
        decisions.append(Decision("--moe-expert-offload", "off", reason))
        return dataclasses.replace(config, offload=unused), decisions
    if slots < 2 * sizes.top_k:
        logger.warning(
            "%d slots a layer are fewer than 2 x top-k (%d): experts will leave before they are used again; give more with "
            "--moe-expert-cache-size, or quantize with --moe-expert-quantization",
            slots,
            2 * sizes.top_k,
        )
    offload = dataclasses.replace(config.offload, moe_expert_cache_size=str(slots))
    if reason:
        decisions.append(Decision("--moe-expert-cache-size", str(slots), reason))
    return dataclasses.replace(config, offload=offload), decisions


def size_step(
    config: EngineConfig, sizes: ModelSizes, device_budget: int | None
) -> tuple[EngineConfig, list[Decision]]:
    """The configuration with a number for --max-prefill-length, and why.

    Every chunk of a prompt brings what a layer lacks over the link once, and on any GPU that takes as long as thousands of
    tokens compute: so the longest step is the best, unless its activations leave experts too few slots, or do not fit.
    """
    if config.scheduler.max_prefill_length is not None:
        return config, []

    def sized(length: int) -> EngineConfig:
        return dataclasses.replace(
            config, scheduler=dataclasses.replace(config.scheduler, max_prefill_length=length)
        )

    if device_budget is None or config.parallel.tensor_parallel_size > 1:  # ranks must cut prompts alike
        return sized(STEP_TOKENS), []
    enough = min(config.offload.num_slots or 2 * sizes.top_k, sizes.num_experts)
    slots = {length: _most_slots(sized(length), sizes, device_budget) for length in STEPS}
    length = next((n for n in STEPS if slots[n] >= enough), STEPS[-1])
    missing = sizes.num_experts - min(config.offload.num_slots or slots[length], sizes.num_experts)
    if not missing:
        return sized(length), []
    kernel, dtype = config.kernel, setup_of(config).dtype
    record = sizes.record_bytes(kernel.moe_expert_quantization, dtype, kernel.moe_quantization_group_size)
    tokens = missing * record * FLOP_PER_LINK_BYTE / (2 * sizes.top_k * sizes.params_per_expert)
    reason = f"the {missing} experts that a layer lacks travel for as long as {tokens:,.0f} tokens compute, or more"
    if length < STEPS[0]:
        reason += f"; {2 * length} tokens leave {slots[2 * length]} slots a layer"
    return sized(length), [Decision("--max-prefill-length", str(length), reason)]


def _slots_that_fit(config: EngineConfig, sizes: ModelSizes, budget: int) -> int:
    slots = _most_slots(config, sizes, budget)
    if slots < 1:
        setup = dataclasses.replace(_setup_of_cache(config), num_slots=1)
        ledger, slot = predict_ledger(sizes, setup), expert_cache_bytes(sizes, setup, 1)
        least = ledger.on("device")
        raise DoesNotFit(
            f"not one expert a layer fits: of {budget / GIB:.2f} GiB everything else takes {(least - slot) / GIB:.2f} and a "
            f"slot in every layer {slot / GIB:.2f}. Lower --max-total-tokens, --max-prefill-length or "
            "--max-running-requests, or quantize with --moe-expert-quantization",
            least,
            budget,
            ledger,
        )
    return slots


def _most_slots(config: EngineConfig, sizes: ModelSizes, budget: int) -> int:
    """Slots a layer that fit into the budget beside everything else, 0 if not one does."""
    setup = _setup_of_cache(config)

    def needed(num_slots: int) -> int:
        return predict_ledger(sizes, dataclasses.replace(setup, num_slots=num_slots)).on("device")

    spare = budget - needed(1)  # fewer fit where more slots make more graphs
    most = min(1 + spare // expert_cache_bytes(sizes, setup, 1), sizes.num_experts)
    return next((n for n in range(most, 0, -1) if needed(n) <= budget), 0)


def _setup_of_cache(config: EngineConfig) -> Setup:
    """With the KV pages that a cache of experts must leave room for."""
    cache = config.cache
    tokens = cache.max_total_tokens if cache.max_total_tokens is not None else 2 * cache.page_size
    return setup_of(config, pages_for(tokens, cache.page_size))


def pages_for(num_tokens: int, page_size: int) -> int:
    """KV pages that hold so many tokens, with the dummy page."""
    return -(-num_tokens // page_size) + 1


def choose_mode(asked: str, on_cuda: bool, refusal: str) -> tuple[str, list[Decision]]:
    """ "device" or "staged", and why. refusal: why not every expert is pinned or kernels can't be had, "" if all is well.

    Raises ValueError where "device" was asked for and cannot be.
    """
    if asked == "staged":
        return "staged", []
    if not on_cuda:
        if asked == "device":
            raise ValueError("--moe-offload-mode device: there is no CUDA device; use staged or auto")
        return "staged", []
    if refusal and asked == "device":
        raise ValueError(f"--moe-offload-mode device: {refusal}; use auto or staged")
    if refusal:
        return "staged", [Decision("--moe-offload-mode", "staged", refusal)]
    return "device", [Decision("--moe-offload-mode", "device", "every expert is in pinned memory")] * (
        asked == "auto"
    )


class ExpertOffload:
    """What the stores of one engine share. mode: "device" or "staged"; decisions: why, and what was pinned.

    Raises ValueError if the host can't hold the experts, or not in the mode that was asked for.
    """

    def __init__(
        self,
        config: OffloadConfig,
        sizes: ModelSizes,
        record_bytes: int,
        device: torch.device,
        facts: HostFacts,
        pinning: Pinning | None = None,
    ) -> None:
        """config: with a number of slots (`size_cache`). record_bytes: of one expert. facts: of the host. pinning: None pins
        nothing.
        """
        assert config.num_slots is not None
        self.num_slots, self.device = config.num_slots, device
        self._sizes, self._record_bytes = sizes, record_bytes
        self._wave_size = config.moe_expert_offload_wave_size
        wanted = record_bytes * sizes.num_experts * sizes.num_sparse
        if wanted > facts.available:
            raise DoesNotFit(
                f"--moe-expert-offload: the experts take {wanted / GIB:.1f} GiB of host memory and "
                f"{facts.available / GIB:.1f} GiB are available; quantize with --moe-expert-quantization, or free some",
                wanted,
                facts.available,
            )
        budget, reason = pin_budget(wanted, facts)
        self._memory = HostMemory(pinning, budget)
        on_cuda = device.type == "cuda"
        self._channel: CopyChannel | None = None
        if on_cuda:
            staged = bool(reason) or config.moe_offload_mode == "staged"
            ring = num_ring_records(self._wave_size, self.num_slots) if staged else 0
            self._channel = CopyChannel(device, self._memory, ring, record_bytes)
        share = self._memory.budget // sizes.num_sparse // record_bytes  # layers share the budget evenly
        self._hosts = deque(
            self._memory.allocate(sizes.num_experts, record_bytes, share) for _ in range(sizes.num_sparse)
        )
        pinned = sum(host.num_pinned for host in self._hosts)
        everything = sizes.num_experts * sizes.num_sparse
        refusal = self._memory.refusal or reason if pinned < everything else ""
        if DeviceStore is None:
            refusal = "it needs Triton, which isn't installed"
        self.mode, self.decisions = choose_mode(config.moe_offload_mode, on_cuda, refusal)
        if on_cuda and pinned < everything:
            self.decisions.append(
                Decision("--moe-expert-offload", f"{pinned / everything:.0%} pinned", refusal)
            )
        self.prefetches = config.moe_prefetch and self.mode == "device"
        if config.moe_prefetch and not self.prefetches:
            reason = (
                "only a cache that the device plans (--moe-offload-mode device) knows when the link is idle"
            )
            self.decisions.append(Decision("--moe-prefetch", "off", reason))
        self._overlap = self._make_overlap()
        self._transient: TransientSlots | None = None
        self._previous: ExpertStore | None = None
        self._told: set[int] = set()

    def _make_overlap(self) -> Overlap | None:
        """How the device stores of all layers share the device; None in staged mode, which has copies instead."""
        if self.mode == "staged":
            return None
        on_cuda = self.device.type == "cuda"
        return Forked(self.device, self.prefetches) if on_cuda else Serial(self.prefetches)

    def store(self, shape: ExpertShape, weight_format: ExpertFormat) -> ExpertStore:
        """The store of one more layer, in the order of layers."""
        host = self._hosts.popleft()
        if self.mode == "staged" or DeviceStore is None:
            return StagedStore(
                host, shape, weight_format, self.num_slots, self.device, self._copies, self._wave_size
            )
        store = DeviceStore(
            host,
            shape,
            weight_format,
            self.num_slots,
            self._sizes.top_k,
            self.device,
            self._transient_slots,
            self._overlap,
        )
        if isinstance(self._previous, DeviceStore):
            self._previous.following = store
        self._previous = store
        return store

    def _copies(self, slab_SB: torch.Tensor) -> Copies:
        return DirectCopies(slab_SB) if self._channel is None else CudaCopies(self._channel, slab_SB)

    def _transient_slots(self, template: Slab) -> TransientSlots:
        """Those of all layers."""
        if self._transient is None:
            num_slots = num_transient_slots(self._wave_size, self._sizes.num_experts)
            self._transient = TransientSlots(template, num_slots, self._copies)
        return self._transient

    def bytes(self) -> StoreBytes:
        """What no single store owns: transient slots and the ring."""
        return StoreBytes(
            device=self._transient.slab.records_SB.nbytes if self._transient is not None else 0,
            pinned=self._channel.num_bytes if self._channel is not None else 0,
        )

    def tell(self, counted: Mapping[int, CacheCounters]) -> None:
        """Say once, of the layers whose prefetching did not pay, which they are. counted: by layer."""
        off = [index for index, counters in counted.items() if counters.early_off]
        new = [index for index in off if index not in self._told]
        if new:
            logger.info("--moe-prefetch: guesses did not pay in layers %s and stopped there", new)
            self._told.update(new)

    def close(self) -> None:
        """Wait for what is under way and unpin all host memory. No step may follow."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._memory.close()


def cache_report(counters: CacheCounters, num_slots: int | None) -> str:
    """One line for people. num_slots: a layer, as resolved."""
    needed = counters.hits + counters.misses
    early = ""
    if counters.early_bytes:
        share = counters.useful_bytes / counters.early_bytes
        early = f"; {counters.early_bytes / 1e6:,.1f} MB of them early, {share:.0%} of which was needed"
    if counters.early_off:
        early += f"; prefetching did not pay in {counters.early_off} layers and stopped there"
    return (
        f"expert cache: {counters.hit_rate:.1%} of {needed:,} experts were in one of {num_slots} slots a layer, "
        f"{counters.num_bytes / 1e6:,.1f} MB copied{early}"
    )


def cache_table(counted: Mapping[int, CacheCounters]) -> Table:
    """The same by layer."""
    prefetched = any(counters.early_bytes or counters.early_off for counters in counted.values())
    table = Table(title="Expert cache by layer", title_justify="left", box=None, padding=(0, 1))
    columns = ["layer", "hits", "misses", "hit rate", "evictions", "MB"]
    for name in columns + ["MB early", "of use", ""] * prefetched:
        table.add_column(name, justify="right")
    for index, c in counted.items():
        row = [str(index), f"{c.hits:,}", f"{c.misses:,}", f"{c.hit_rate:.1%}", f"{c.evictions:,}"]
        row.append(f"{c.num_bytes / 1e6:,.1f}")
        if prefetched:
            row += [f"{c.early_bytes / 1e6:,.1f}", f"{c.useful_bytes / 1e6:,.1f}", "stopped" * c.early_off]
        table.add_row(*row)
    return table
