"""Copies of expert records into slots, which run beside the computation, and the two rules that keep both right.

    start    a copy into a slot begins only when everything launched before the slot's last `release` is done with it
    wait     what is launched from now on finds the slots' copies complete

On a CUDA device copies have a stream of their own and each slot an event for either rule. Records that aren't pinned travel
through a ring of pinned ones: the host copies into the ring while earlier records of it travel. On a CPU a copy is over when
`start` returns. A store that forgets a rule works on a CPU all the same, so tests replace `Copies` by one that is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from minisgl.moe.store.pinned import HostMemory


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after everything that was launched on the stream so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class Copies(Protocol):
    """Copies into the slots of one slab."""

    def start(self, slot: int, records_NB: torch.Tensor, pinned: bool) -> None:
        """Begin to copy host records into a slot and those behind it."""
        ...

    def wait(self, slots: Sequence[int]) -> None:
        """What is launched from now on finds every copy into `slots` that was started so far complete."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """What was launched so far may read `slots`; copies started from now on come after it."""
        ...


class DirectCopies:
    """Copies at once: for slots in host memory."""

    def __init__(self, slab_SB: torch.Tensor) -> None:
        self._slab_SB = slab_SB

    def start(self, slot: int, records_NB: torch.Tensor, pinned: bool) -> None:
        self._slab_SB[slot : slot + len(records_NB)].copy_(records_NB)

    def wait(self, slots: Sequence[int]) -> None:
        pass  # complete since `start`

    def release(self, slots: Sequence[int]) -> None:
        pass  # what was launched has run


class CopyChannel:
    """The copy stream of a device and its ring, shared by all layers.

    ring_records: records that may be on their way through pinned memory at a time; where pinning them is refused, records
    that aren't pinned are copied by the driver's own staging, which is slower and keeps the host waiting.
    """

    def __init__(
        self, device: torch.device, memory: HostMemory, ring_records: int, record_bytes: int
    ) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        ring = memory.allocate(ring_records, record_bytes) if ring_records else None
        self._ring_RB = ring.records_EB if ring is not None and ring.num_pinned == ring_records else None
        self._sent: list[torch.cuda.Event | None] = [None] * ring_records
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Pinned bytes of the ring."""
        return 0 if self._ring_RB is None else self._ring_RB.nbytes

    def copy(self, target_NB: torch.Tensor, records_NB: torch.Tensor, pinned: bool) -> None:
        """Enqueue a copy on the stream, through the ring unless the records are pinned."""
        with torch.cuda.stream(self.stream):
            if pinned or self._ring_RB is None:
                target_NB.copy_(records_NB, non_blocking=pinned)
                return
            for target_B, record_B in zip(target_NB, records_NB):
                place = self._next
                self._next = (place + 1) % len(self._sent)
                if (sent := self._sent[place]) is not None:
                    sent.synchronize()
                self._ring_RB[place].copy_(record_B)
                target_B.copy_(self._ring_RB[place], non_blocking=True)
                self._sent[place] = recorded(self.stream)


class CudaCopies:
    """Copies into a slab on a CUDA device, on the channel's stream."""

    def __init__(self, channel: CopyChannel, slab_SB: torch.Tensor) -> None:
        self._channel, self._slab_SB = channel, slab_SB
        self._copied: list[torch.cuda.Event | None] = [None] * len(slab_SB)
        self._released: list[torch.cuda.Event | None] = [None] * len(slab_SB)
        self.release(range(len(slab_SB)))  # the memory may still be in use by whoever had it before

    def start(self, slot: int, records_NB: torch.Tensor, pinned: bool) -> None:
        slots = range(slot, slot + len(records_NB))
        self._wait(self._channel.stream, [self._released[one] for one in slots])
        self._channel.copy(self._slab_SB[slot : slots.stop], records_NB, pinned)
        copied = recorded(self._channel.stream)
        for one in slots:
            self._copied[one] = copied

    def wait(self, slots: Sequence[int]) -> None:
        stream = torch.cuda.current_stream(self._channel.device)
        self._wait(stream, [self._copied[slot] for slot in slots])

    def _wait(self, stream: torch.cuda.Stream, events: Sequence[torch.cuda.Event | None]) -> None:
        """For each event once: slots that were filled or given back together share theirs."""
        for event in {id(event): event for event in events}.values():
            if event is not None:
                stream.wait_event(event)

    def release(self, slots: Sequence[int]) -> None:
        event = recorded(torch.cuda.current_stream(self._channel.device))
        for slot in slots:
            self._released[slot] = event
