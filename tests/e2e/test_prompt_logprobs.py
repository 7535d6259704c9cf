"""Log-probabilities of prompts through `LLM`, in chunks, beside other requests and after a cached run, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.core import FinishReason
from tests.e2e.model_factory import make_model, make_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    make_model(path, "qwen3_moe")
    return path


def test_scores_equal_hugging_face(folder: Path) -> None:
    prompts = make_prompts([90, 1, 2, 33])
    params = [
        SamplingParams(max_tokens=0, prompt_logprobs=3),
        *[SamplingParams(max_tokens=2, prompt_logprobs=0)] * 3,
    ]
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # 7 rows of logits at a time, prompts cut after 32 tokens
    with LLM(str(folder), device="cpu", num_pages=200, max_prefill_length=32, max_running_requests=7) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=1))  # fills the prefix cache
        outputs = llm.generate(prompts, params)
    for prompt, output, asked in zip(prompts, outputs, params):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert [item.token_id for item in output.prompt_logprobs] == prompt[1:]
        own = logprobs.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        found = torch.tensor([item.logprob for item in output.prompt_logprobs])
        torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)
        for item, row in zip(output.prompt_logprobs, logprobs):
            values = torch.tensor([value for _, value in item.top])
            torch.testing.assert_close(
                values, row.topk(asked.prompt_logprobs or 0).values, atol=1e-4, rtol=1e-4
            )
    assert (outputs[0].token_ids, outputs[0].finish_reason) == ([], FinishReason.LENGTH)
    assert all(len(output.token_ids) == 2 for output in outputs[1:])
    assert all(output.num_cached_tokens == 0 for output in outputs)
