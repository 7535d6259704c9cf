"""gpt-oss on CUDA: sinks, windows and biased experts give Hugging Face's tokens in fp32, with graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.e2e.model_factory import greedy, make_model, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("graphs", [0, 8])
def test_fp32_tokens_equal_hugging_face(tmp_path: Path, graphs: int) -> None:
    model = make_model(tmp_path, "gpt_oss")
    prompts = make_prompts([1, 16, 45, 100])
    llm = LLM(str(tmp_path), device="cuda", dtype="float32", num_pages=500, cuda_graph_max_bs=graphs)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    found = [output.token_ids for output in llm.generate(prompts, params)]
    assert found == [greedy(model, prompt, 32) for prompt in prompts]
