"""Experts in host memory through the whole engine: the same text and the same logits, bit for bit, and numbers that add up."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from minisgl import LLM, SamplingParams
from minisgl.demo import show_offload
from tests.e2e.model_factory import make_model, make_prompts

NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 2, 3
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen3_moe")
    return path


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", **{"num_pages": 100, **options})


def outcome(llm: LLM, lengths: list[int]) -> list[tuple]:
    """Tokens and the exact log-probabilities of the likeliest ones."""
    outputs = llm.generate(make_prompts(lengths), GREEDY)
    return [(o.token_ids, [sorted(lp.top) for lp in o.logprobs or []]) for o in outputs]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_offloaded_equals_resident_bit_for_bit(folder: Path, quantization: str) -> None:
    resident = load(folder, moe_expert_quantization=quantization)
    batches = [[1], [40], [3, 17, 9, 1, 30, 2, 2, 8], [5]]
    expected = [outcome(resident, lengths) for lengths in batches]
    again = [outcome(resident, lengths) for lengths in batches]  # prompts come from the prefix cache
    for size in (1, 3, NUM_EXPERTS - 1):
        offloaded = load(
            folder, moe_expert_quantization=quantization, moe_expert_offload=True, moe_expert_cache_size=size
        )
        assert [outcome(offloaded, lengths) for lengths in batches] == expected, f"{size} slots"
        assert [outcome(offloaded, lengths) for lengths in batches] == again, f"{size} slots, warm"
        offloaded.close()


def test_wave_size_and_prompt_chunks_change_no_bit(folder: Path) -> None:
    expected = outcome(load(folder, max_prefill_length=16), [33, 4])
    for wave_size in (1, 2, 100):
        llm = load(
            folder,
            max_prefill_length=16,
            moe_expert_offload=True,
            moe_expert_cache_size=3,
            moe_expert_offload_wave_size=wave_size,
        )
        assert outcome(llm, [33, 4]) == expected


def test_counters_ledger_and_decisions(folder: Path) -> None:
    resident = load(folder)
    llm = load(folder, moe_expert_offload=True, moe_expert_cache_size=3)
    assert resident.expert_cache() == {}
    assert sum(c.hits + c.misses for c in llm.expert_cache().values()) == 0
    llm.generate(make_prompts([6]), GREEDY)
    cache = llm.expert_cache()
    assert sorted(cache) == list(range(NUM_LAYERS))
    record = llm.engine.decoder.moe_layers()[0].store.bytes().host // NUM_EXPERTS
    for counters in cache.values():
        assert counters.hits + counters.misses >= 12 * TOP_K
        assert counters.num_bytes == counters.misses * record
        assert counters.misses - counters.evictions <= 3
    ledger = llm.engine.ledger()
    assert ledger.line("experts") == 3 * NUM_LAYERS * record
    assert ledger.line("experts on the host") == NUM_EXPERTS * NUM_LAYERS * record
    assert resident.engine.ledger().line("experts") == ledger.line("experts on the host")
    roomy = load(folder, moe_expert_offload=True, moe_expert_cache_size=50)
    assert roomy.expert_cache() == {}
    assert roomy.engine.ledger().line("experts on the host") == 0
    assert any(d.flag == "--moe-expert-offload" and d.value == "off" for d in roomy.decisions)
    assert load(folder, moe_expert_offload=True).config.offload.num_slots == 4


def test_few_slots_warn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(folder, moe_expert_offload=True, moe_expert_cache_size=4)
    assert not caplog.records
    load(folder, moe_expert_offload=True, moe_expert_cache_size=3)
    assert "fewer than 2 x top-k" in caplog.text


def test_trace_is_written_at_the_end(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    llm = load(folder, moe_expert_offload=True, moe_expert_cache_size=3, moe_trace=str(path))
    llm.generate(make_prompts([6]), GREEDY)
    llm.close()
    trace = np.load(path)
    assert trace["ids"].shape == (6 + 11, NUM_LAYERS, TOP_K)
    assert int(trace["num_experts"]) == NUM_EXPERTS


def test_an_abort_in_the_middle_harms_nobody(folder: Path) -> None:
    expected = outcome(load(folder), [9])
    llm = load(folder, moe_expert_offload=True, moe_expert_cache_size=2)
    stream = llm.stream(make_prompts([30])[0], GREEDY)
    next(stream)
    stream.close()
    assert outcome(llm, [9]) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe_expert_cache_size": 0}, "leave out --moe-expert-offload"),
        ({"moe_expert_cache_size": "many"}, "use auto or at least 1"),
        ({"moe_expert_cache_size": 4, "moe_expert_offload": False}, "needs --moe-expert-offload"),
        ({"moe_expert_offload_wave_size": 0}, "must be at least 1"),
        ({"max_total_tokens": 100}, "give one"),
        ({"moe_prefetch": True, "moe_expert_offload": False}, "add --moe-expert-offload"),
        ({"moe_prefetch": True, "moe_offload_mode": "staged"}, "use device or auto"),
        (
            {"moe_prefetch": True, "tensor_parallel_size": 2, "expert_parallel_size": 2},
            "leave out --expert-parallel-size",
        ),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(folder, **{"moe_expert_offload": True, **options})


def test_prefetching_that_cannot_be_is_left_out_and_said(folder: Path) -> None:
    llm = load(folder, moe_expert_offload=True, moe_expert_cache_size=4, moe_prefetch=True)
    (decision,) = (d for d in llm.decisions if d.flag == "--moe-prefetch")
    assert (decision.value, "device plans" in decision.reason) == ("off", True)
    roomy = load(folder, moe_expert_offload=True, moe_expert_cache_size=50, moe_prefetch=True)
    assert not roomy.config.offload.moe_prefetch, "every expert has a slot: there is nothing to fetch"


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="no experts"):
        load(tmp_path, moe_expert_offload=True)


def test_the_demo_shows_it() -> None:
    console = Console(file=StringIO(), width=200)
    show_offload(LLM("demo", device="cpu", num_pages=64), {"model": "demo", "device": "cpu"}, console)
    assert isinstance(console.file, StringIO)
    assert "8 slots a layer" in console.file.getvalue()
    assert "the same text" in console.file.getvalue()


def test_max_total_tokens_sizes_the_kv_cache(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", max_total_tokens=100, page_size=16)
    assert llm.engine.kv_pool.num_pages == 8
