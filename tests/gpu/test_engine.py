"""The whole engine on CUDA: tokens equal Hugging Face in fp32, and graphs, overlap and preemption change none of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
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
