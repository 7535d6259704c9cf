"""Sums of a few rows over the GPUs of one machine, through memory that each reads of all others: one kernel, no rings.

A decode step adds up [B, D] twice a layer. NCCL takes about 20 us for that however small it is; a kernel that copies a rank's
tensor into a buffer, tells the others, and adds up all buffers takes a few. PyTorch has it (symmetric memory); this is
when to use it and how to end it. The buffers are added in the order of ranks, so every rank gets the same bits.

Multicast objects of NVSwitch are left alone: they can outlive a process that is killed, and the sum here needs none.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group
from torch.distributed import PrefixStore, Store  # type: ignore[reportPrivateImportUsage]
from torch.distributed._symmetric_memory import _SymmetricMemory  # type: ignore[reportPrivateImportUsage]

CAPACITY = 1 << 20
"""Bytes up to which a sum goes this way: 256 rows of 2,048 bf16. Larger ones are as fast by NCCL, which keeps fewer copies."""
_DTYPES = (torch.bfloat16, torch.float32)  # that PyTorch's kernel adds
_ALIGNMENT = 16  # bytes
_RELEASE_S = 5.0


def reach_each_other(num_ranks: int) -> bool:
    """Whether this process sees a GPU for each of so many ranks and all pairs of them can read each other's memory."""
    devices = range(num_ranks)
    if torch.cuda.device_count() < num_ranks:
        return False
    return all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b)


class PeerSum:
    """The sum of all ranks' tensors, for those that `fits` says yes to. graph-safe: the host never waits."""

    def __init__(
        self, name: str, process_group: Any, store: Store, device: torch.device, capacity: int = CAPACITY
    ) -> None:
        """Every rank must call it at the same time, with the same name, which no earlier one in any of the processes had:
        PyTorch keeps what it knows of a name, and gives the groups of a second model the names of the first one's. store:
        where ranks meet. Raises RuntimeError where memory can't be shared.
        """
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._name, self._capacity = name, capacity
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        # until the default group is destroyed
        _register_process_group(name, process_group)  # type: ignore[reportArgumentType]
        _SymmetricMemory.set_group_info(name, rank, size, PrefixStore(name, store))
        self._buffer = _SymmetricMemory.empty_strided_p2p((capacity,), (1,), torch.uint8, device)
        self._shared: Any = _SymmetricMemory.rendezvous(self._buffer, name)
        self._aside = torch.cuda.Stream(device)

    def fits(self, x: torch.Tensor) -> bool:
        size = x.numel() * x.element_size()
        return x.dtype in _DTYPES and 0 < size <= self._capacity and size % _ALIGNMENT == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x, contiguous, summed over ranks; a new tensor."""
        mine = self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(mine, x, "sum", self._name)

    def release(self) -> None:
        """Let kernels that wait for a rank which is gone run to their end, on whatever numbers: their step is lost.

        A kernel waits until a word of its own signal pad is 1 and clears it, or until one of a peer's is 0 and sets it.
        """
        me, deadline = self._shared.rank, time.monotonic() + _RELEASE_S
        pads = [
            self._shared.get_signal_pad(rank, dtype=torch.int32) for rank in range(self._shared.world_size)
        ]
        with torch.cuda.stream(self._aside):
            while time.monotonic() < deadline:
                for rank, pad in enumerate(pads):
                    pad.fill_(int(rank == me))
                self._aside.synchronize()
