"""Log-probabilities of prompts where ranks share the vocabulary: all of them compute the logits, rank 0 alone reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from tests.e2e.model_factory import make_model, make_prompts


def test_two_ranks_score_as_one(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    prompts = make_prompts([1, 17, 40])
    params = [
        SamplingParams(max_tokens=n, temperature=0, prompt_logprobs=2, ignore_eos=True) for n in (2, 0, 3)
    ]
    found = []
    for size in (1, 2):
        options = {"device": "cpu", "dtype": "float32", "num_pages": 100, "max_running_requests": 5}
        with LLM(str(tmp_path), tensor_parallel_size=size, max_prefill_length=16, **options) as llm:
            assert llm.engine.group.size == size
            found.append(llm.generate(prompts, params))
    for one, two in zip(*found):
        assert one.token_ids == two.token_ids
        assert one.prompt_logprobs is not None and two.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == len(one.prompt_token_ids) - 1
        for a, b in zip(one.prompt_logprobs, two.prompt_logprobs):
            assert (a.token_id, [token for token, _ in a.top]) == (b.token_id, [token for token, _ in b.top])
            assert [a.logprob, *(v for _, v in a.top)] == pytest.approx(
                [b.logprob, *(v for _, v in b.top)], abs=1e-4
            )
