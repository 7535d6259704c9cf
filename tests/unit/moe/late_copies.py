"""A test double of copies into slots: as late as the contract permits, and strict about who reads what when."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LateCopies:
    """Copies that happen at the last permitted moment: when somebody waits for them. Until then the slot is NaN.

    log: ("start" | "wait" | "release", slot) in order. Refuses a copy into a slot that was handed out and not released.
    """

    def __init__(self, slab_SB: torch.Tensor) -> None:
        self.slab_SB, self.log = slab_SB, []
        slab_SB.fill_(0xFF)
        self._late: dict[int, torch.Tensor] = {}
        self._read: set[int] = set()

    def start(self, slot: int, records_NB: torch.Tensor, pinned: bool) -> None:
        for one, record_B in enumerate(records_NB, start=slot):
            assert one not in self._read, "a kernel may still be reading this slot"
            self.slab_SB[one] = 0xFF
            self._late[one] = record_B
            self.log.append(("start", one))

    def wait(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._late:
                self.slab_SB[slot] = self._late.pop(slot)
            self._read.add(slot)
            self.log.append(("wait", slot))

    def release(self, slots: Sequence[int]) -> None:
        self._read -= set(slots)
        self.log += [("release", slot) for slot in slots]
