"""Between a routing and a plan made by the host: which experts a step uses, and which slots that gives its routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True)
class Look:
    """What the host must know to serve a prompt: which experts it uses, ascending; `state`, as it was asked for; the experts of
    its last tokens. index_R: int64, the expert of each route, num_experts for none.
    """

    used: list[int]
    state: list[list[int]]
    last: set[int]
    index_R: torch.Tensor


def look(ids_TK: torch.Tensor, num_experts: int, num_last: int, state: Sequence[torch.Tensor]) -> Look:
    """A routing, and int32 tensors beside it, in one copy. Waits for the device."""
    index_R = ids_TK.reshape(-1).long().remainder_(num_experts + 1)
    used_E1 = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids_TK.device).scatter_(0, index_R, 1)
    parts = [used_E1, ids_TK[-num_last:].reshape(-1), *state]
    values = torch.cat(parts).tolist()
    lists = []
    for part in parts:
        lists.append(values[: len(part)])
        values = values[len(part) :]
    used, last, *found = lists
    return Look([e for e in range(num_experts) if used[e]], found, set(last) - {-1}, index_R)


def slots_of_waves(
    look: Look, waves: Sequence[Mapping[int, int]], num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For waves {expert: slot}: (int32 [waves, E], the slot of each expert; int32 [waves, R], of each route), -1 for none. One
    copy to the device for all of them.
    """
    table = np.full((len(waves), num_experts + 1), -1, dtype=np.int32)  # the last column answers "no expert"
    for row, wave in zip(table, waves):
        row[list(wave)] = list(wave.values())
    host, device = torch.from_numpy(table), look.index_R.device
    on_device = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return on_device[:, :num_experts], on_device[:, look.index_R]
