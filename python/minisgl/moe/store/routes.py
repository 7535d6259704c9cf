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
    """Each expert of a routing once, in the order of the last token that uses it, then of experts. Waits for the device."""
    ids_TK = ids_TK.cpu()
    tokens_R, choices_R = (ids_TK >= 0).nonzero(as_tuple=True)
    used_R = ids_TK[tokens_R, choices_R].long()
    times_E = used_R.bincount(minlength=num_experts).tolist()
    last_E = torch.full((num_experts,), -1).scatter_reduce(0, used_R, tokens_R, "amax").tolist()
    order = sorted((last, expert) for expert, last in enumerate(last_E) if last >= 0)
    return [Use(expert, last, times_E[expert]) for last, expert in order]


def slots_of_routes(ids_TK: torch.Tensor, slot_of: Mapping[int, int], num_experts: int) -> torch.Tensor:
    """int32 [T, K]: the slot of each route's expert, -1 where `slot_of` has none."""
    slot_of_E1 = torch.full((num_experts + 1,), -1, dtype=torch.int32)  # the last answers id -1
    slot_of_E1[list(slot_of)] = torch.tensor(list(slot_of.values()), dtype=torch.int32)
    return slot_of_E1.to(ids_TK.device, non_blocking=True)[ids_TK.long()]
