"""Groups of ranks that work on one model: what each holds, and how tensors pass between them.

`Group()` is a group of one: its collectives return what they are given and its shards are whole. So a layer written for
many ranks runs on one without a branch and without a copy. `TorchGroup` is the same over torch.distributed: NCCL between
CUDA devices, Gloo between CPUs.

Promise: after `all_reduce`, `all_gather` and `broadcast` every rank holds the same bits. Ranks route tokens from what they
hold, so without it they would disagree about where a token went.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT = timedelta(minutes=10)
"""How long ranks may take to find each other: nodes of a cluster rarely start in the same minute."""

_gather_rows = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the newer name, from torch 2.13


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts of a dimension of length `total`: elements start..stop.

    Where total does not divide, parts are rounded up: all have room for `width` elements and the last use fewer, or none.
    """

    total: int
    index: int = 0
    count: int = 1

    @property
    def width(self) -> int:
        return -(-self.total // self.count)

    @property
    def start(self) -> int:
        return min(self.index * self.width, self.total)

    @property
    def stop(self) -> int:
        return min(self.start + self.width, self.total)

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Flight:
    """A collective on its way. `wait` returns its result; on CUDA the stream waits, not the host."""

    result: torch.Tensor
    finish: Callable[[], object] = lambda: None

    def wait(self) -> torch.Tensor:
        self.finish()
        return self.result


class Group:
    """One rank alone. `TorchGroup` says what every method means for several."""

    rank = 0
    size = 1
    graph_safe = True
    """Whether a CUDA graph can hold its collectives."""
    num_collectives = 0
    """How many collectives this rank has joined: in a hang, the rank with the lowest number is the one that hangs."""

    def shard(self, total: int) -> Shard:
        """This rank's part of a dimension."""
        return Shard(total, self.rank, self.size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, which may be overwritten."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Every rank's x, of one shape, side by side along dim in the order of ranks."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, written into this rank's."""
        return x

    def smallest(self, number: int) -> int:
        """The smallest of every rank's numbers. The host waits."""
        return number

    def start_gather(self, x_CX: torch.Tensor) -> Flight:
        """`all_gather` along dim 0, in the background."""
        return Flight(x_CX)

    def start_exchange(self, x_RX: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Flight:
        """Rows sent[r] of x to each rank r, in order; the result has received[r] rows of each rank r. In the background."""
        assert list(sent) == list(received) == [x_RX.shape[0]]
        return Flight(x_RX)


SOLO = Group()


class PlannedGroup(Group):
    """Rank 0 of a group that does not exist yet: what it would hold can be asked, nothing can be sent."""

    def __init__(self, size: int) -> None:
        self.size = size


class TorchGroup(Group):
    """Ranks of a torch.distributed process group."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        """device: where the tensors are. Gloo moves CUDA tensors through host memory: slow, and good enough for tests."""
        self._group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        gloo = dist.get_backend(process_group) == "gloo"
        self.graph_safe = not gloo
        self.device = device
        self._staged = gloo and device.type == "cuda"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        mine = self._host(x.contiguous())
        dist.all_reduce(mine, group=self._group)
        return mine.to(x.device)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = self.start_gather(x[None]).wait()  # [ranks, *x.shape]
        dim %= x.ndim
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        mine = self._host(x)
        dist.broadcast(mine, group=self._group, group_src=0)
        return x if mine is x else x.copy_(mine)

    def smallest(self, number: int) -> int:
        mine = self._host(torch.tensor([number], device=self.device))
        dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=self._group)
        return int(mine)

    def start_gather(self, x_CX: torch.Tensor) -> Flight:
        mine = self._host(x_CX.contiguous())
        out = mine.new_empty((mine.shape[0] * self.size, *mine.shape[1:]))
        work = _gather_rows(out, mine, group=self._group, async_op=True)
        return self._flight(out, work, x_CX.device)

    def start_exchange(self, x_RX: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Flight:
        mine = self._host(x_RX.contiguous())
        out = mine.new_empty((sum(received), *mine.shape[1:]))
        work = dist.all_to_all_single(out, mine, list(received), list(sent), group=self._group, async_op=True)
        return self._flight(out, work, x_RX.device)

    def _host(self, x: torch.Tensor) -> torch.Tensor:
        self.num_collectives += 1
        return x.cpu() if self._staged else x

    def _flight(self, out: torch.Tensor, work: Any, device: torch.device) -> Flight:
        if not self._staged:
            return Flight(out, work.wait)
        work.wait()
        return Flight(out.to(device))


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet and who this one is: torch.distributed's environment as numbers.

    local_rank: this rank's number on its own machine, which is the number of its GPU.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """What torchrun, a Slurm script or a Kubernetes job has set; None where WORLD_SIZE is absent.

        Raises ValueError, naming the variable, for an environment that is only half set.
        """
        if "WORLD_SIZE" not in environment:
            return None
        numbers = {}
        for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
            text = environment.get(name, "")
            if not text.isdecimal():
                raise ValueError(
                    f"WORLD_SIZE is set, but {name}={text!r} is no number: launch with torchrun, or set it"
                )
            numbers[name] = int(text)
        if "MASTER_ADDR" not in environment:
            raise ValueError("WORLD_SIZE is set, but MASTER_ADDR is not: name the machine of rank 0")
        rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
        if rank >= size:
            raise ValueError(f"RANK={rank} must be less than WORLD_SIZE={size}")
        local = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", rank)))
        return cls(rank, size, local, environment["MASTER_ADDR"], numbers["MASTER_PORT"])

    def environment(self) -> dict[str, str]:
        """The variables that say this."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def backend_for(device: torch.device, wanted: str = "auto") -> str:
    """ "nccl" for CUDA and "gloo" for CPU, unless wanted says otherwise. ValueError for NCCL without CUDA."""
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted == "nccl" and device.type != "cuda":
        raise ValueError("--distributed-backend nccl needs CUDA devices: use gloo on a CPU")
    return wanted
