"""Between a routing and a plan made by the host: which experts a step uses, and which slots that gives its routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FEW_IDS = 128  # that the host counts sooner than it tells the device to


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
    its last tokens. index_R: int64, the expert of each route, num_experts for none; where it is known.
    """

    used: list[int]
    state: list[list[int]]
    last: set[int]
    index_R: torch.Tensor | np.ndarray


def look(ids_TK: torch.Tensor, num_experts: int, num_last: int, state: Sequence[torch.Tensor]) -> Look:
    """A routing, and int32 tensors beside it, in one copy. Waits for the device.

    Few ids come to the host; of many it learns only which experts they name.
    """
    few, index_R = ids_TK.numel() <= FEW_IDS, None
    if few:
        parts = [ids_TK.reshape(-1), *state]
    else:
        index_R = ids_TK.reshape(-1).long().remainder_(num_experts + 1)
        used_E1 = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids_TK.device).scatter_(
            0, index_R, 1
        )
        parts = [used_E1, ids_TK[-num_last:].reshape(-1), *state]
    values = torch.cat(parts).cpu().numpy()
    found = [part.tolist() for part in np.split(values, np.cumsum([len(part) for part in parts])[:-1])]
    if index_R is None:
        ids_R, *found = found
        used, last = sorted(set(ids_R) - {-1}), set(ids_R[-num_last * ids_TK.shape[1] :])
        return Look(used, found, last - {-1}, np.array(ids_R, dtype=np.int64) % (num_experts + 1))
    used_E1, last, *found = found
    return Look([e for e in range(num_experts) if used_E1[e]], found, set(last) - {-1}, index_R)


def slots_of_waves(
    look: Look, waves: Sequence[Mapping[int, int]], num_experts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """For waves {expert: slot}: (int32 [waves, E], the slot of each expert; int32 [waves, R], of each route), -1 for none, on
    `device`. One copy to it for all of them.
    """
    index_R = look.index_R
    known = isinstance(index_R, np.ndarray)
    columns = _aligned(num_experts + 1)
    table = np.full((len(waves), columns + _aligned(len(index_R) if known else 0)), -1, dtype=np.int32)
    for row, wave in zip(table, waves):
        row[list(wave)] = list(wave.values())  # column num_experts answers "no expert"
    if isinstance(index_R, np.ndarray):
        table[:, columns : columns + len(index_R)] = table[:, index_R]
    host = torch.from_numpy(table)
    on_device = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    slots_WR = on_device[:, columns : columns + len(index_R)] if known else on_device[:, index_R]
    return on_device[:, :num_experts], slots_WR


def _aligned(count: int) -> int:
    """Up to 16 bytes of int32, so that kernels needn't be compiled for rows that begin anywhere."""
    return -(-count // 4) * 4
