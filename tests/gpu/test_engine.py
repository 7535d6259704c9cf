"""The whole engine on CUDA: tokens equal Hugging Face in fp32, and graphs, overlap and preemption change none of them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import Request
from minisgl.engine.memory import DoesNotFit
from tests.e2e.model_factory import greedy, make_model, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
LENGTHS = [1, 16, 17, 45, 100]


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "name", ["llama", "mistral_window", "qwen2", "qwen3_moe", "qwen3_moe_mixed", "mixtral"]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_fp32_tokens_equal_hugging_face(tmp_path: Path, name: str, page_size: int) -> None:
    model = make_model(tmp_path, name)
    prompts = make_prompts(LENGTHS)
    expected = [greedy(model, prompt, 48) for prompt in prompts]
    llm = LLM(
        str(tmp_path),
        device="cuda",
        dtype="float32",
        page_size=page_size,
        num_pages=1500,
        max_prefill_length=64,
    )
    assert tokens(llm, prompts) == expected
    assert tokens(llm, prompts) == expected, "warm"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_overlap_change_no_token(tmp_path: Path, name: str, dtype: str) -> None:
    make_model(tmp_path, name)
    prompts = make_prompts([3, 40, 16, 1, 33, 20, 64, 9, 10])
    runs = {}
    for graphs in (0, 8):  # nine requests: one more than the largest graph
        for disable_overlap in (True, False):
            llm = LLM(
                str(tmp_path),
                device="cuda",
                dtype=dtype,
                num_pages=200,
                cuda_graph_max_bs=graphs,
                disable_overlap=disable_overlap,
                max_running_requests=16,
            )
            runs[graphs, disable_overlap] = tokens(llm, prompts)
            sampled = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True)
            runs[graphs, disable_overlap] += tokens(llm, prompts[:5], sampled)
    assert all(run == runs[0, True] for run in runs.values())


def eventful(llm: LLM, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Tokens of requests that arrive while others run; every third is aborted after a few of its tokens, and left out."""
    found: dict[str, list[int]] = {f"request-{i}": [] for i in range(len(prompts))}
    waiting, aborted = list(enumerate(prompts)), set()
    while waiting or llm.scheduler.has_work:
        for i, prompt in waiting[:2]:
            llm.scheduler.add(Request(f"request-{i}", tuple(prompt), GREEDY))
        waiting = waiting[2:]
        for _ in range(3):
            for output in llm.scheduler.step():
                found[output.request_id] += [] if output.token_id is None else [output.token_id]
        for i in range(0, len(prompts), 3):
            name = f"request-{i}"
            if len(found[name]) >= 5 and name not in aborted:
                llm.scheduler.abort(name)
                aborted.add(name)
    assert len(aborted) == -(-len(prompts) // 3)
    return {name: ids for name, ids in found.items() if name not in aborted}


@pytest.mark.parametrize("num_pages", [200, 24], ids=["roomy", "preempting"])
def test_arrivals_and_aborts_change_no_token(tmp_path: Path, num_pages: int) -> None:
    make_model(tmp_path, "qwen3_moe")
    prompts = make_prompts([16, 1, 15, 17, 40, 2, 32, 5, 31, 8, 3])
    expected = None
    for graphs in (0, 4):
        for disable_overlap in (True, False):
            llm = LLM(
                str(tmp_path),
                device="cuda",
                dtype="float32",
                num_pages=num_pages,
                cuda_graph_max_bs=graphs,
                disable_overlap=disable_overlap,
                max_running_requests=5,
            )
            found = eventful(llm, prompts)
            assert all(len(ids) == GREEDY.max_tokens for ids in found.values())
            expected = expected or found
            assert found == expected, (graphs, disable_overlap)


def test_a_memory_limit_is_kept(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    gc.collect()
    torch.cuda.empty_cache()
    options = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 4, "memory_ratio": 0.9}
    llm = LLM(str(tmp_path), gpu_memory_limit="3GiB", **options)
    try:
        assert 1.5 * 2**30 < llm.engine.ledger().total < 2.5 * 2**30
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
    finally:
        llm.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(DoesNotFit):
        LLM(str(tmp_path), gpu_memory_limit="513MiB", **options)
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_preemption_on_the_device(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    prompts = make_prompts([20] * 8)
    roomy = LLM(str(tmp_path), device="cuda", dtype="float32", num_pages=200)
    tight = LLM(str(tmp_path), device="cuda", dtype="float32", num_pages=14)
    assert tokens(tight, prompts) == tokens(roomy, prompts)
    assert tight.stats().preemptions > 0


def test_pages_fill_what_memory_leaves(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", memory_ratio=0.05, max_running_requests=4)
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.03 * total < torch.cuda.memory_allocated() < 0.06 * total
    assert llm.engine.ledger().total > 0.03 * total


def test_scratch_space_is_the_one_reserved(tmp_path: Path) -> None:
    """KV pages take what is left beside it, so nothing may allocate it a second time."""
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", num_pages=200, max_running_requests=4)
    before = torch.cuda.memory_allocated()
    llm.generate(make_prompts(LENGTHS), GREEDY)
    scratch = next(line.num_bytes for line in llm.engine.ledger().lines if line.name == "workspace")
    assert torch.cuda.memory_allocated() - before < scratch / 2


def test_a_decode_step_waits_for_the_device_once(tmp_path: Path) -> None:
    """No synchronisation between planning and launch; only the fetch of the finished step's tokens waits, on an event."""
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", num_pages=100, max_running_requests=4)
    stream = llm.stream([5, 6, 7], SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        next(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            llm.scheduler.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.close()
