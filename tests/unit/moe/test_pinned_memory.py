"""Host memory of records: what is pinned, what happens when the system refuses, and that nothing stays pinned."""

from __future__ import annotations

import gc

import torch

from minisgl.moe.store.pinned import GIB, HostFacts, HostMemory, gather_host_facts, pin_budget

MIB = 2**20


class CountingPinning:
    """Pretends to pin, up to a limit."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.pinned = limit, {}

    def pin(self, address: int, num_bytes: int) -> str | None:
        if sum(self.pinned.values()) + num_bytes > self.limit:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        assert address % 4096 == 0
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_ranks_of_one_machine_share_what_may_be_pinned() -> None:
    whole = HostFacts(total=200 * GIB, available=100 * GIB)
    assert whole.share(1) == whole
    share = whole.share(4)
    assert (share.total, share.available) == (50 * GIB, 25 * GIB)
    assert pin_budget(20 * GIB, share) == (20 * GIB, "")
    budget, reason = pin_budget(40 * GIB, share)
    assert budget == 23 * GIB and "25.0 GiB" in reason


def test_nothing_stays_pinned() -> None:
    pinning = CountingPinning()
    memory = HostMemory(pinning, budget=GIB)
    records = [memory.allocate(4, MIB) for _ in range(3)]
    assert [r.num_pinned for r in records] == [4, 4, 4]
    assert memory.pinned_bytes == sum(pinning.pinned.values()) == 12 * MIB
    memory.close()
    assert pinning.pinned == {} and memory.pinned_bytes == 0
    memory.close()
    memory = HostMemory(pinning, budget=GIB)
    kept = memory.allocate(4, MIB)
    assert pinning.pinned
    del memory
    gc.collect()
    assert pinning.pinned == {}, "an engine that is dropped without close() unpins, too"
    kept.records_EB.fill_(1)


def test_records_are_pinned_while_the_budget_lasts() -> None:
    memory = HostMemory(CountingPinning(), budget=10 * MIB)
    assert [memory.allocate(4, MIB).num_pinned for _ in range(4)] == [4, 4, 2, 0]
    assert memory.refusal == ""
    memory = HostMemory(CountingPinning(), budget=10 * MIB)
    assert [memory.allocate(4, MIB, pin_at_most=3).num_pinned for _ in range(4)] == [3, 3, 3, 1]


def test_a_refusal_is_told_and_what_is_pinned_stays() -> None:
    pinning = CountingPinning(limit=6 * MIB)
    memory = HostMemory(pinning, budget=GIB)
    records = [memory.allocate(4, MIB) for _ in range(3)]
    assert [r.num_pinned for r in records] == [4, 0, 0]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in memory.refusal
    for r in records:
        r.records_EB.fill_(7)
        assert r.pinned_bytes == r.num_pinned * MIB


def test_without_pinning_it_is_ordinary_memory() -> None:
    memory = HostMemory(None, budget=GIB)
    records = memory.allocate(3, 512)
    assert records.records_EB.shape == (3, 512)
    assert records.records_EB.dtype == torch.uint8
    assert records.records_EB.data_ptr() % 4096 == 0
    assert records.num_pinned == memory.pinned_bytes == 0


def test_memory_goes_back_to_the_system() -> None:
    def resident_pages() -> int:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[1])

    before = resident_pages()
    records = HostMemory().allocate(64, MIB)
    records.records_EB.fill_(1)
    assert resident_pages() - before > 60 * MIB // 4096
    del records
    gc.collect()
    assert resident_pages() - before < 8 * MIB // 4096


def test_budget() -> None:
    roomy = HostFacts(total=64 * GIB, available=60 * GIB)
    assert pin_budget(30 * GIB, roomy) == (30 * GIB, "")
    budget, reason = pin_budget(30 * GIB, HostFacts(total=32 * GIB, available=20 * GIB))
    assert budget == 18 * GIB and "20.0 GiB" in reason
    budget, reason = pin_budget(30 * GIB, HostFacts(total=32 * GIB, available=31 * GIB, wsl=True))
    assert budget == 16 * GIB and ".wslconfig" in reason
    assert pin_budget(GIB, HostFacts(total=4 * GIB, available=GIB))[0] == 0
    facts = gather_host_facts()
    assert 0 < facts.available <= facts.total
