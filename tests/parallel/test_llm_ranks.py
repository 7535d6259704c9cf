"""`LLM` over child ranks: the tokens of Hugging Face, and an error that names a rank which dies or stops."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.engine.ranks import ConnectedRanks
from minisgl.engine.score import token_logprobs
from minisgl.engine.step import EngineLost
from tests.e2e.model_factory import greedy, make_model, make_prompts
from tests.parallel.processes import runs

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
EP = {"expert_parallel_size": 2}


@dataclass(frozen=True)
class Oracle:
    folder: str
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, "qwen3_moe", max_position_embeddings=4096)
    prompts = make_prompts([1, 17, 20])
    return Oracle(str(folder), prompts, [greedy(model, prompt, NUM_TOKENS) for prompt in prompts])


def load(folder: str, **options: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "num_pages": 200, "tensor_parallel_size": 2, **options}
    return LLM(folder, **options)


def child_pids(llm: LLM) -> list[int]:
    assert isinstance(llm.engine.ranks, ConnectedRanks)
    return [child.pid for child in llm.engine.ranks.children]


@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_length": 16, "page_size": 8, "num_pages": 10},
        {"moe_expert_offload": True, "moe_expert_cache_size": "3"},
        {
            **EP,
            "moe_ep_dispatch": "dynamic",
            "moe_expert_placement": "round-robin",
            "moe_replicated_experts": (2,),
        },
        {**EP, "moe_ep_dispatch": "static", "moe_expert_offload": True, "moe_expert_cache_size": "2"},
    ],
    ids=["tp, chunks, preemption", "tp, offload", "ep dynamic", "ep static, offload"],
)
def test_tokens_equal_hugging_face(oracle: Oracle, options: dict[str, Any]) -> None:
    with load(oracle.folder, **options) as llm:
        pids = child_pids(llm)
        assert len(pids) == llm.config.parallel.tensor_parallel_size - 1
        assert llm.engine.ranks.num_neighbours == 2, "they share this machine's memory"
        for _ in range(2):  # cold, then with cached prefixes
            assert [o.token_ids for o in llm.generate(oracle.prompts, GREEDY)] == oracle.expected
        if "page_size" in options:
            assert llm.stats().preemptions > 0
    assert not any(runs(pid) for pid in pids), "close ends them"


def test_sampling_penalties_and_logprobs_are_those_of_one_rank(oracle: Oracle) -> None:
    """Only rank 0 knows how to sample; the others learn the tokens. Quantized experts are cut before they are quantized."""
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=20,
        presence_penalty=2.0,
        logprobs=2,
        prompt_logprobs=1,
        ignore_eos=True,
    )
    options = {"moe_expert_quantization": "int8"}
    with load(oracle.folder, tensor_parallel_size=1, **options) as llm:
        expected = llm.generate(oracle.prompts, params)
    with load(oracle.folder, **EP, **options) as llm:
        outputs = llm.generate(oracle.prompts, params)
        with pytest.raises(ValueError, match="--tp 1, or ask for prompt_logprobs"):
            token_logprobs(llm.engine, oracle.prompts[2])
        with pytest.raises(ValueError, match="close the other LLM first"):
            load(oracle.folder)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    for one, other in zip(outputs, expected):
        for a, b in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert a is not None and b is not None
            assert [t.logprob for t in a] == pytest.approx([t.logprob for t in b], abs=1e-4)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "rank 1 has died"), (signal.SIGSTOP, "rank 1 has not answered")]
)
def test_a_rank_that_dies_or_stops_is_named_within_ten_seconds(
    oracle: Oracle, number: signal.Signals, words: str
) -> None:
    sent = []
    with load(oracle.folder) as llm:
        (child,) = llm.engine.ranks.children  # type: ignore[attr-defined]

        def strike() -> None:
            time.sleep(0.3)
            sent.append(time.monotonic())
            child.send_signal(number)

        threading.Thread(target=strike).start()
        endless = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
        with pytest.raises(EngineLost, match=words):
            llm.generate([[1, 2, 3]], endless)
        assert time.monotonic() - sent[0] < 10
        with pytest.raises(EngineLost, match=words):
            llm.generate([[1, 2, 3]], endless)
    assert not runs(child.pid)


def test_a_rank_that_cannot_load_is_reported(oracle: Oracle, tmp_path: Path) -> None:
    """Its own error reaches the user. (Its file vanishes between rank 0's look at the configuration and the load.)"""
    for file in Path(oracle.folder).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="--tp=3 does not fit a model of 4 heads"):
        load(oracle.folder, tensor_parallel_size=3)
    with pytest.raises(ValueError, match="expert 8, but"):
        load(oracle.folder, **EP, moe_replicated_experts=(8,))
    with load(oracle.folder, tensor_parallel_size=1) as llm:
        assert llm.engine.group.size == 1, "nothing of the failed starts is left"
