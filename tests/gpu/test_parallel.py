"""Ranks on CUDA. Two on one GPU over Gloo check the CUDA path, for correctness alone; with more GPUs, NCCL and its graphs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.engine.ranks import ConnectedRanks
from minisgl.engine.step import EngineLost
from tests.e2e.model_factory import greedy, make_model, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
EP = {"expert_parallel_size": 2}
GRAPHS = {"cuda_graph_max_bs": 4}  # every size compiles kernels, on every rank
OPTIONS: dict[str, dict[str, Any]] = {
    "tp": GRAPHS,
    "ep reduce": {**EP, **GRAPHS, "moe_ep_dispatch": "reduce", "moe_replicated_experts": (1,)},
    "ep dynamic": {**EP, "moe_ep_dispatch": "dynamic"},
    "ep static": {**EP, **GRAPHS, "moe_ep_dispatch": "static", "moe_expert_placement": "round-robin"},
    "ep offload": {**EP, "moe_expert_offload": True, "moe_expert_cache_size": "3"},
}


def check_tokens(folder: Path, **options: Any) -> bool:
    """Tokens equal Hugging Face's. Returns whether decode steps ran as CUDA graphs."""
    model = make_model(folder, "qwen3_moe")
    prompts = make_prompts([1, 17, 45])
    expected = [greedy(model, prompt, 32) for prompt in prompts]
    with LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        num_pages=200,
        tensor_parallel_size=2,
        **options,
    ) as llm:
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected
        return llm.engine._graphs is not None


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_on_one_gpu_over_gloo(tmp_path: Path, name: str) -> None:
    assert not check_tokens(tmp_path, distributed_backend="gloo", **OPTIONS[name]), "no graph can hold Gloo"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", OPTIONS)
def test_two_gpus_over_nccl(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # multicast is not given on every shared host
    graphs = check_tokens(tmp_path, **OPTIONS[name])
    assert graphs == (name != "ep dynamic")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_that_dies_ends_the_step(tmp_path: Path) -> None:
    """The other GPU waits inside a kernel for it, until the watching thread aborts the group."""
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", num_pages=200, tensor_parallel_size=2)
    ranks = llm.engine.ranks
    assert isinstance(ranks, ConnectedRanks)
    stream = llm.stream(
        make_prompts([17])[0], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    )
    next(stream)
    ranks.children[0].kill()
    start = time.monotonic()
    with pytest.raises(EngineLost, match="rank 1"):
        for _ in stream:
            pass
    assert time.monotonic() - start < 20
    llm.close()


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    make_model(
        tmp_path,
        "llama",
        num_attention_heads=64,
        num_key_value_heads=64,
        hidden_size=128,
        intermediate_size=128,
    )
    with pytest.raises(ValueError, match="needs 64 GPUs on this machine"):
        LLM(str(tmp_path), device="cuda", tensor_parallel_size=64)
