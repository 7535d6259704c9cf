"""Which prompts the device plans by itself, and in which waves their experts pass by."""

from __future__ import annotations

import pytest

from minisgl.moe.store.prompts import passes, waves_passing

BYTES = {"int4": 2_506_752, "fp8": 4_732_928, "bf16": 9_437_184}


def planned(
    num_tokens: int, record_bytes: int, num_experts: int = 128, top_k: int = 8, num_slots: int = 49
) -> bool:
    """Of Qwen3-30B-A3B's shape."""
    return passes(num_tokens, top_k, 3 * 2048 * 768, record_bytes, (num_experts, num_slots, 32))


@pytest.mark.parametrize("name", list(BYTES))
def test_few_tokens_pass_and_many_stream(name: str) -> None:
    """64 tokens need nearly everything: then copies are started ahead, and the host is slower only if they are small."""
    assert planned(8, BYTES[name])
    assert planned(64, BYTES[name]) == (name == "int4")
    assert not any(planned(n, BYTES[name]) for n in (0, 2048, 8192))


def test_a_kernel_reads_large_records_slower_than_a_host_plans() -> None:
    """Two of eight experts of 176 million weights, in bf16."""
    assert not planned(2, 2 * 176_000_000, num_experts=8, top_k=2, num_slots=2)


def test_many_waves_cost_more_launches_than_copies() -> None:
    assert planned(8, 1_000_000, num_experts=512)
    assert not planned(128, 1_000_000, num_experts=512)


def test_waves() -> None:
    assert [waves_passing(n, 128, 32) for n in (0, 1, 32, 33, 4096)] == [1, 1, 1, 2, 4]
