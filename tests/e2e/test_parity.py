"""Greedy tokens equal Hugging Face transformers, fp32: every family, chunked prompts, page sizes, caches, preemption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.e2e.model_factory import CONFIGS, greedy, make_model, make_prompts

NUM_TOKENS = 64
LENGTHS = [1, 3, 16, 17, 32, 45, 70, 100]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Oracle:
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, request.param)
    # Dynamic rope depends on the length of the sequence so far. A prompt longer than the original window has no one meaning:
    # Hugging Face rotates all of it for its full length, which no cached prefix and no chunk could share. Up to it both agree.
    lengths = LENGTHS
    if request.param == "llama_dynamic":
        lengths = [min(n, model.config.max_position_embeddings - i) for i, n in enumerate(LENGTHS)]
    prompts = make_prompts(lengths)
    return Oracle(folder, prompts, [greedy(model, prompt, NUM_TOKENS) for prompt in prompts])


def outputs(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def load(oracle: Oracle, **options: object) -> LLM:
    return LLM(
        str(oracle.folder), device="cpu", dtype="float32", num_pages=options.pop("num_pages", 1500), **options
    )


@pytest.mark.parametrize(("chunk", "page_size"), [(7, 1), (64, 16)])
def test_greedy_tokens_cold_and_warm(oracle: Oracle, chunk: int, page_size: int) -> None:
    llm = load(oracle, max_prefill_length=chunk, page_size=page_size)
    assert outputs(llm, oracle.prompts) == oracle.expected
    cached = llm.stats().cached_tokens
    assert outputs(llm, oracle.prompts) == oracle.expected, "warm"
    reused = llm.stats().cached_tokens - cached
    full_pages = sum((len(prompt) - 1) // page_size * page_size for prompt in oracle.prompts)
    assert reused == full_pages, "every full page of every prompt comes from the cache"


@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_tokens_under_preemption(oracle: Oracle, overlap: bool) -> None:
    # 12 pages of 16: one sequence of 164 tokens fits, two do not.
    llm = load(oracle, page_size=16, num_pages=13, max_prefill_length=64, disable_overlap=not overlap)
    assert outputs(llm, oracle.prompts) == oracle.expected
    assert llm.stats().preemptions > 0


def test_greedy_tokens_one_by_one_without_prefix_cache(oracle: Oracle) -> None:
    llm = load(oracle, max_running_requests=1, cache_type="naive")
    assert outputs(llm, oracle.prompts[:4]) == oracle.expected[:4]
    assert llm.stats().cached_tokens == 0


@pytest.mark.parametrize("layout", ["fused_experts", "sharded", "bf16_file"])
def test_checkpoint_layouts(tmp_path: Path, layout: str) -> None:
    """Fused 3-D experts, several shards with an index, and a bf16 file read into fp32 give the same model."""
    dtype = torch.bfloat16 if layout == "bf16_file" else torch.float32
    model = make_model(
        tmp_path,
        "qwen3_moe",
        dtype=dtype,
        fused_experts=layout == "fused_experts",
        max_shard_size="60KB" if layout == "sharded" else "1GB",
    ).float()
    if layout == "sharded":
        assert (tmp_path / "model.safetensors.index.json").is_file()
    prompts = make_prompts([5, 20])
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", num_pages=100)
    assert outputs(llm, prompts) == [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
