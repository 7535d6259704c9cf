"""Between a routing and a plan made by the host: which experts a step uses, and which slots that gives its routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Use:
    """An expert that a step uses: the last token that does, and by how many routes."""

    expert: int
    last_token: int
    times: int


def used_experts(ids_TK: torch.Tensor, num_experts: int) -> list[Use]:
    """Each expert of a routing once, in the order of the last token that uses it, then of experts. Waits for the device.

    Counted where the ids are. On the host the 65,536 ids of a long prompt would be shared out among threads, which on a busy
    machine may wait for each other longer than a layer takes.
    """
    num_tokens, top_k = ids_TK.shape
    ids_R = ids_TK.reshape(-1).long()
    bins_R = torch.where(ids_R < 0, num_experts, ids_R)  # the last bin takes the -1
    tokens_R = torch.arange(num_tokens * top_k, device=ids_TK.device) // top_k
    times_E1 = torch.zeros(num_experts + 1, dtype=torch.long, device=ids_TK.device)
    last_E1 = torch.full_like(times_E1, -1)
    times_E1.scatter_add_(0, bins_R, torch.ones_like(bins_R))
    last_E1.scatter_reduce_(0, bins_R, tokens_R, "amax")
    times, last = torch.stack((times_E1, last_E1))[:, :num_experts].tolist()
    order = sorted((token, expert) for expert, token in enumerate(last) if token >= 0)
    return [Use(expert, token, times[expert]) for token, expert in order]


def slots_of_routes(ids_TK: torch.Tensor, slot_of: Mapping[int, int], num_experts: int) -> torch.Tensor:
    """int32 [T, K]: the slot of each route's expert, -1 where `slot_of` has none."""
    slot_of_E1 = torch.full((num_experts + 1,), -1, dtype=torch.int32)  # the last answers id -1
    slot_of_E1[list(slot_of)] = torch.tensor(list(slot_of.values()), dtype=torch.int32)
    return slot_of_E1.to(ids_TK.device, non_blocking=True)[ids_TK.long()]
