"""Quantized experts through the whole engine: it loads, it writes, and it stays near the unquantized logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from tests.e2e.model_factory import make_model, make_prompts

FORMATS = {"int8": 0.1, "fp8": 0.2, "int4": 0.6, "fp8_block": 0.2, "mxfp4": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    return path


def first_logprobs(folder: Path, quantization: str) -> list[dict[int, float]]:
    llm = LLM(
        str(folder),
        device="cpu",
        num_pages=100,
        moe_expert_quantization=quantization,
        moe_quantization_group_size=32,
    )
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    outputs = llm.generate(make_prompts([5, 9, 30]), params)
    return [dict(o.logprobs[0].top) for o in outputs if o.logprobs]


@pytest.mark.parametrize("quantization", FORMATS)
def test_quantized_experts_stay_near(folder: Path, quantization: str) -> None:
    exact, quantized = first_logprobs(folder, "none"), first_logprobs(folder, quantization)
    differences = [
        abs(one[token] - other[token])
        for one, other in zip(exact, quantized)
        for token in one
        if token in other
    ]
    assert len(differences) > 20
    assert 0 < sum(differences) / len(differences) < FORMATS[quantization], "too far, or not quantized at all"


def test_a_format_that_cannot_hold_the_experts_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="group"):
        LLM(str(folder), device="cpu", moe_expert_quantization="int4", moe_quantization_group_size=128)
