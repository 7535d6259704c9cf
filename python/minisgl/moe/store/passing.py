"""Prompts whose experts pass by a cache that the device plans: what one launch decides about them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl.moe.kernels.passing import pass_kernel
from minisgl.moe.store.device_plan import DevicePlan, Listed
from minisgl.moe.store.prompts import waves_passing
from minisgl.moe.workspace import next_power_of_two

CHUNK = 512  # routes of a program


class Passing(NamedTuple):
    """places_WTK int32 [1 + waves, T, K], places_WE [1 + waves, E]: places of routes and of experts, first those in the cache's
    slab, then, by wave, those in the transient one; -1: elsewhere. waves: what each of them fetches.
    """

    places_WTK: torch.Tensor
    places_WE: torch.Tensor
    waves: list[Listed]


def plan_passing(plan: DevicePlan, ids_TK: torch.Tensor, num_last: int, size: int) -> Passing:
    """Plan a step whose experts pass by; see `pass_kernel`. Counts hits and misses, and leaves the cache as it is.

    ids_TK: int32, contiguous, T > 0. num_last: tokens at the end whose experts pass first. size: experts a wave.
    """
    (num_tokens, top_k), num_experts = ids_TK.shape, plan.num_experts
    waves = waves_passing(ids_TK.numel(), num_experts, size)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids_TK.device)

    places_WTK, places_WE = ints(1 + waves, num_tokens, top_k), ints(1 + waves, num_experts)
    experts_WX, slots_WX, num_fetch_W4 = ints(waves, size), ints(waves, size), ints(waves, 4)
    pass_kernel[(-(-ids_TK.numel() // CHUNK),)](
        ids_TK,
        plan.slot_of_E,
        plan.early.place_of_S,
        places_WE,
        places_WTK,
        experts_WX,
        slots_WX,
        num_fetch_W4,
        plan.counters,
        ids_TK.numel(),
        num_last * top_k,
        waves,
        size,
        E=num_experts,
        EXPERTS=max(next_power_of_two(num_experts + 1), 32),
        CHUNK=CHUNK,
    )
    return Passing(places_WTK, places_WE, [Listed(*one) for one in zip(experts_WX, slots_WX, num_fetch_W4)])
