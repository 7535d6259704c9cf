"""How the experts of a prompt pass by a cache: in which waves, and who plans them. Plain Python, no tensors.

The host waits for a routing and then starts a copy for every run of neighbouring records, while the link is idle; unless the
layer needs nearly everything: then the next one's copies are under way before. The device does not wait, but its kernels
read host memory slower than the copy engine does, nothing is ahead of a layer's routing, and it launches what the worst routing
needs. So few tokens are the device's, and many are the host's, the sooner the larger records are.
"""

from __future__ import annotations

from collections.abc import Collection

from minisgl.moe.store.planning import EMPTY, SlotTable

STREAM_AHEAD = 0.9  # the next layer's experts follow if this layer needed so much of what it lacked
# Measured on an H200 behind PCIe 5 x16 (docs/offload.md); slower links favour the host, slower hosts the device.
LINK_BYTES_PER_S = 55e9  # of the copy engine
LINK_LOSS = 0.07  # of a kernel that reads host memory
WAIT_S = 1.5e-3  # of a layer for which the host waits and starts copies, beside what they travel for
COPIES_S = 4.5e-3  # of such a layer whose copies were started ahead, however fast they travel
PASS_S = 0.4e-3  # of a layer that the device plans, beside what its experts travel for
WAVE_S = 0.5e-3  # for the host to launch a wave, which is why waves have all transient slots, and none is filled during another
FLOP_PER_S = 25e12  # of the least of the cards that people keep experts away from, at few rows an expert


def waves_passing(num_routes: int, num_experts: int, size: int) -> int:
    """Waves of `size` experts in which those of so many routes pass, whatever they are."""
    return max(1, -(-min(num_routes, num_experts) // size))


def passes(
    num_tokens: int, top_k: int, num_weights: int, record_bytes: int, sizes: tuple[int, int, int]
) -> bool:
    """Whether a prompt of so many tokens is sooner served if the device plans and fetches than if the host does.

    num_weights: of an expert. sizes: experts, slots, transient slots of a layer. All experts count as equally popular.
    """
    num_experts, num_slots, num_transient = sizes
    num_routes = num_tokens * top_k
    share = 1 - (1 - 1 / num_experts) ** num_routes
    link_s = share * (num_experts - num_slots) * record_bytes / LINK_BYTES_PER_S
    streaming_s = max(link_s, COPIES_S) if share >= STREAM_AHEAD else link_s + WAIT_S
    launches_s = waves_passing(num_routes, num_experts, num_transient) * WAVE_S
    compute_s = num_routes * 2 * num_weights / FLOP_PER_S
    return num_tokens > 0 and max(link_s * (1 + LINK_LOSS), launches_s) + compute_s + PASS_S < streaming_s


def pass_step(
    table: SlotTable, used: Collection[int], last: Collection[int], size: int
) -> tuple[list[int], list[list[int]]]:
    """A step whose experts pass by: (those of `used` that have a slot, waves of at most `size` of the others, each in transient
    slots from the first one on). The definition of the pass kernel.

    Experts of the `last` tokens pass first, each kind in ascending order. The table stays as it is.
    """
    experts = sorted(expert for expert in used if expert != EMPTY)
    hits = [expert for expert in experts if table.slot_of_E[expert] != EMPTY]
    missing = [expert for expert in experts if table.slot_of_E[expert] == EMPTY]
    missing.sort(key=lambda expert: expert not in last)
    return hits, [missing[start : start + size] for start in range(0, len(missing), size)]
