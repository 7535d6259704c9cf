"""The processes that run one engine together: how they start, hear of steps, and end.

Rank 0 is the process that the user started; it schedules, samples and answers. Every other rank builds the same engine with
its own shards and repeats the steps that rank 0 sends (`engine/worker.py`).

    one machine    rank 0 starts the others as child processes, which end when their standard input closes: however rank 0
                   ends, none of them stays behind
    several        torchrun, Slurm or Kubernetes start every rank and set torch.distributed's environment; all run the same
                   command, and ranks above 0 follow

`Ranks` itself is one rank alone: everything here then does nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from minisgl.config import EngineConfig
from minisgl.engine.step import Chunk, EngineLost
from minisgl.engine.watch import Watch
from minisgl.engine.wire import decode_chunks, encode_chunks
from minisgl.parallel import SOLO, START_TIMEOUT, Group, Rendezvous, TorchGroup, backend_for

_HEAD = 512  # whole numbers of the first broadcast: its length, and most decode steps entirely
_STOP = -1
_FOREVER = timedelta(days=365)  # between two steps a server may wait for as long as nobody asks it anything
_END_S = 10.0


@dataclass(frozen=True)
class Setup:
    """What rank 0 tells the others before they build their engines. config: resolved."""

    config: EngineConfig
    folder: str


class Ranks:
    """One rank alone; `ConnectedRanks` is one of several."""

    group: Group = SOLO
    is_follower = False
    num_neighbours = 1
    """Ranks on this machine, this one included: they share its memory."""

    def __init__(self, config: EngineConfig) -> None:
        """config: resolved; that of rank 0 on all ranks."""
        self.config = config

    def device(self, kind: str) -> torch.device:
        """The device of this rank. kind: "cuda" or "cpu". With its index, as tensors have it: what is kept for each device, a
        workspace for example, is found by it.
        """
        return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def wait_ready(self) -> None:
        """Return when all ranks have come this far, however long some take to load."""

    def send(self, chunks: Sequence[Chunk]) -> None:
        """Let the others run this step too. Only rank 0's call does anything."""

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around what touches other ranks: an error inside ends all of them, and becomes EngineLost that names the culprit."""
        yield

    def check(self) -> None:
        """Raise EngineLost if another rank has failed meanwhile. Costs nothing: a thread does the watching."""

    def close(self) -> None:
        """End the other ranks. May be called again."""


class ConnectedRanks(Ranks):
    """One of several ranks."""

    def __init__(
        self, place: Rendezvous, store: Any, config: EngineConfig, children: Sequence[subprocess.Popen] = ()
    ) -> None:
        """Joins; returns when every rank has. config: resolved, the same on all ranks.

        Raises ValueError if this process has joined a group already, or NCCL is asked for without CUDA.
        """
        if dist.is_initialized():
            raise ValueError("this process is part of a group of ranks already: close the other LLM first")
        super().__init__(config)
        self.place, self.children = place, list(children)
        self.is_follower = place.rank > 0
        self._failure: str | None = None
        self._closed = False
        self._store = store
        device, parallel = self.device(config.model.device), config.parallel
        backend = backend_for(device, parallel.distributed_backend)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = parallel.collective_timeout or (10.0 if backend == "gloo" else 60.0)
        self.watch = Watch(
            store,
            place.rank,
            place.size,
            lambda: self.group.num_collectives,
            self._dead_child,
            self._on_failure,
        )
        with self.guard():
            store.set(f"machine/{place.rank}", socket.gethostname())
            self._meet("joined", START_TIMEOUT)
            machines = [store.get(f"machine/{rank}").decode() for rank in range(place.size)]
            self.num_neighbours = machines.count(machines[place.rank])
            dist.init_process_group(
                "gloo", store=store, rank=place.rank, world_size=place.size, timeout=START_TIMEOUT
            )
            self._steps: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
            self._tensors: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self.group = TorchGroup(self._tensors, device)

    def device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device(kind)
        return torch.device("cuda", self.place.local_rank % torch.cuda.device_count())

    def wait_ready(self) -> None:
        self._meet("ready", _FOREVER)
        self.watch.serve()

    def _meet(self, where: str, timeout: timedelta) -> None:
        """Return when all ranks have called this. Polls, so that the death of one ends the waiting."""
        deadline = time.monotonic() + timeout.total_seconds()
        self._store.add(where, 1)
        while int(self._store.add(where, 0)) < self.place.size:
            self.check()
            if time.monotonic() > deadline:
                raise EngineLost(f"not all of {self.place.size} ranks started within {timeout}")
            time.sleep(0.02)

    def send(self, chunks: Sequence[Chunk]) -> None:
        if not self.is_follower:
            with self.guard():
                self._broadcast(encode_chunks(chunks))

    def receive(self) -> list[Chunk] | None:
        """The next step, None when rank 0 has closed. For ranks above 0."""
        head = torch.empty(_HEAD, dtype=torch.int64)
        dist.broadcast(head, group=self._steps, group_src=0)
        length = int(head[0])
        if length == _STOP:
            return None
        rest = torch.empty(max(0, length - (_HEAD - 1)), dtype=torch.int64)
        if len(rest):
            dist.broadcast(rest, group=self._steps, group_src=0)
        return decode_chunks(torch.cat([head[1 : 1 + length], rest]).numpy())

    def _broadcast(self, numbers: np.ndarray, length: int | None = None) -> None:
        head = torch.zeros(_HEAD, dtype=torch.int64)
        head[0] = len(numbers) if length is None else length
        first = torch.from_numpy(numbers[: _HEAD - 1])
        head[1 : 1 + len(first)] = first
        dist.broadcast(head, group=self._steps, group_src=0)
        if len(numbers) > _HEAD - 1:
            dist.broadcast(torch.from_numpy(numbers[_HEAD - 1 :]), group=self._steps, group_src=0)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except EngineLost:
            raise
        except Exception as error:
            culprit = self._blame(error)
            self._kill_children()
            raise EngineLost(culprit) from error
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise EngineLost(self._failure)

    def _blame(self, error: Exception) -> str:
        """Who caused an error here: a rank that died makes the collectives of all others fail. The first to say so is right."""
        from_peer = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        deadline = time.monotonic() + (2.0 if from_peer else 0.0)
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._failure is None:
            words = f"rank {self.place.rank}: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the store may be what failed
                late = self.watch.laggard() if from_peer else None
                words = (
                    words
                    if late is None
                    else f"rank {late} hangs: it has not joined a collective of the others"
                )
                self.watch.report(words)
            self._failure = words
        return self._failure

    def _on_failure(self, problem: str) -> None:
        """In the watching thread. Rank 0 wakes its main thread, which may wait for a collective; others just end."""
        self._failure = problem
        if self.is_follower:
            print(f"minisgl: rank {self.place.rank} ends: {problem}", file=sys.stderr, flush=True)
            os._exit(1)
        self._kill_children()
        with contextlib.suppress(Exception):
            self._tensors.abort()

    def _dead_child(self) -> str | None:
        for rank, child in enumerate(self.children, start=1):
            if child.poll() is not None:
                return f"rank {rank} has died: exit code {child.returncode}"
        return None

    def _kill_children(self) -> None:
        for child in self.children:
            child.kill()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.watch.stop()
        if self._failure is None and not self.is_follower:
            with contextlib.suppress(Exception):
                self._broadcast(np.zeros(0, dtype=np.int64), _STOP)
        end_children(self.children)
        dist.destroy_process_group()


def end_children(children: Sequence[subprocess.Popen]) -> None:
    """Close the input of child ranks, wait for them to end by themselves, then insist."""
    for child in children:
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
    deadline = time.monotonic() + _END_S
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def start_ranks(setup: Setup) -> Ranks:
    """Rank 0's, or any rank's where a launcher started them all: join the others, starting them if nobody did.

    Raises ValueError, with the remedy, where --tp does not fit the launcher's number of ranks or this machine's GPUs.
    """
    config, place = setup.config, Rendezvous.from_environment()
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return Ranks(config)
    _check_gpus(config)
    if place is None:
        return _spawn(setup, size)
    if place.size != size:
        raise ValueError(
            f"--tp={size}, but the launcher started {place.size} ranks: make both the same (torchrun --nnodes x "
            "--nproc-per-node)"
        )
    store, rank, _ = next(iter(rendezvous("env://", timeout=START_TIMEOUT)))
    store = PrefixStore("minisgl", store)
    if rank == 0:
        _tell_setup(store, setup)
    else:
        config = received_setup(store).config
    return ConnectedRanks(place, store, config)


def _tell_setup(store: Any, setup: Setup) -> None:
    store.set("setup", pickle.dumps(setup))


def received_setup(store: Any) -> Setup:
    """What rank 0 said, which it does before it joins."""
    store.wait(["setup"], START_TIMEOUT)
    return pickle.loads(store.get("setup"))


def _check_gpus(config: EngineConfig) -> None:
    parallel = config.parallel
    if config.model.device != "cuda" or parallel.distributed_backend == "gloo":
        return
    place = Rendezvous.from_environment()
    needed = parallel.tensor_parallel_size if place is None else place.local_rank + 1
    if needed > torch.cuda.device_count():
        raise ValueError(
            f"--tp={parallel.tensor_parallel_size} needs {needed} GPUs on this machine, which has "
            f"{torch.cuda.device_count()}: lower it, or start ranks on more machines with torchrun"
        )


def _spawn(setup: Setup, size: int) -> Ranks:
    """Start the other ranks of this machine as children, and join them."""
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    _tell_setup(store, setup)
    # a child imports the package that this process has, wherever it was found
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    children = []
    try:
        for rank in range(1, size):
            place = Rendezvous(rank, size, rank, "127.0.0.1", store.port)
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "minisgl.engine.worker"],
                    stdin=subprocess.PIPE,
                    env={**os.environ, **place.environment(), "PYTHONPATH": path},
                )
            )
        return ConnectedRanks(Rendezvous(0, size, 0, "127.0.0.1", store.port), store, setup.config, children)
    except BaseException:
        for child in children:
            child.kill()
        end_children(children)
        raise
