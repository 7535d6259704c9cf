"""One MoE layer whose experts live in pinned host memory, beside the same layer with all of them on the device.

A step copies the experts it lacks into slots while those it has are computed. Few tokens: the device plans, and the step
is part of a CUDA graph; many: they stream through transient slots, which waits for the routing once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import moe_cases
from minisgl.moe.base import Slab
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.store.copies import CopyChannel, CudaCopies
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.overlap import Forked
from minisgl.moe.store.pinned import CudaPinning, HostMemory
from minisgl.moe.store.streaming import TransientSlots
from record import event_ms

TRANSIENT_SLOTS = 32
REPLAYS = 20


@dataclass(frozen=True)
class OffloadResult:
    """One line of the table, and of the record. link_gb_per_s: bytes that came over the link a second of the whole step."""

    format: str
    num_tokens: int
    num_slots: int
    us: float
    resident_us: float
    hit_rate: float
    link_gb_per_s: float
    in_graph: bool


@contextmanager
def offloaded(slab: Slab, weight_format: ExpertFormat, top_k: int, num_slots: int) -> Iterator[DeviceStore]:
    """A store of the slab's experts in host memory, with `num_slots` of them on the device. Raises SystemExit where the host
    refuses to pin them."""
    num_experts, nbytes = slab.records_SB.shape
    device = slab.records_SB.device
    memory = HostMemory(CudaPinning(), budget=2 * num_experts * nbytes)
    host = memory.allocate(num_experts, nbytes)
    if host.num_pinned < num_experts:
        raise SystemExit(f"--include-offload: {memory.refusal or 'the experts could not be pinned'}")
    host.records_EB.copy_(slab.records_SB)
    channel = CopyChannel(device, memory, 0, nbytes)

    def transient(template: Slab) -> TransientSlots:
        return TransientSlots(template, TRANSIENT_SLOTS, lambda slots_XB: CudaCopies(channel, slots_XB))

    try:
        yield DeviceStore(
            host, slab.shape, weight_format, num_slots, top_k, device, transient, Forked(device)
        )
    finally:
        torch.cuda.synchronize()
        memory.close()


def run_offloaded(
    backend: FusedMoeBackend, case: moe_cases.LayerCase, store: DeviceStore, index: int
) -> torch.Tensor:
    routing = backend.route(case.logits[index], case.rule)
    step = backend.begin(case.x[index], routing, case.problem)
    for placement in store.place(routing, step.awaits_records):
        step.run(placement)
    return step.finish()


def measure_offloaded(
    backend: FusedMoeBackend, case: moe_cases.LayerCase, store: DeviceStore, resident_us: float
) -> OffloadResult:
    """Over the case's rows and logits in turn. Raises SystemExit unless the result has the bits of the resident layer's."""
    sets, num_tokens = len(case.x), case.problem.num_tokens
    same = torch.equal(run_offloaded(backend, case, store, 0), moe_cases.run_layer(backend, case, 0))
    if not same:
        raise SystemExit(f"{case.problem}: experts in host memory gave another result; nothing was timed")
    in_graph = store.graph_safe(num_tokens)
    step: Callable[[int], object] = lambda index: run_offloaded(backend, case, store, index)  # noqa: E731
    for index in range(sets):
        step(index)
    before = store.counters()
    if in_graph:
        us = moe_cases.time_graph(step, sets, REPLAYS).median
    else:
        us = statistics.median(event_ms(lambda i=i: step(i), 3, 1) for i in range(sets)) * 1e3
    done = store.counters() - before
    bytes_per_step = done.num_bytes / max(done.hits + done.misses, 1) * _needed(case)
    return OffloadResult(
        format=case.problem.format,
        num_tokens=num_tokens,
        num_slots=store.num_slots,
        us=round(us, 1),
        resident_us=round(resident_us, 1),
        hit_rate=round(done.hit_rate, 3),
        link_gb_per_s=round(bytes_per_step / us / 1e3, 1),
        in_graph=in_graph,
    )


def _needed(case: moe_cases.LayerCase) -> float:
    """Experts a step needs, averaged over the sets."""
    return sum(case.distinct(logits) for logits in case.logits) / len(case.logits)


def line(result: OffloadResult) -> str:
    how = "graph" if result.in_graph else "streamed"
    return (
        f"{result.format:10}{result.num_tokens:>6}{result.us:>10.1f}  resident {result.resident_us:.1f} us, "
        f"{result.num_slots} slots, {result.hit_rate:.0%} hits, link {result.link_gb_per_s:.1f} GB/s, {how}"
    )
