"""The bundled demo model: legible numbers. Held-out perplexity equals transformers', and every expert format keeps it."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from minisgl import LLM
from minisgl.engine.score import token_logprobs
from minisgl.models.registry import resolve_model

HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.txt"
WINDOW = 384  # tokens scored at a time, within the demo model's context
FORMATS = {"int8": 1.01, "fp8": 1.01, "int4": 1.03}


@lru_cache
def windows() -> list[list[int]]:
    text = HELD_OUT.read_text(encoding="utf-8")
    ids = demo("none").tokenizer.encode(text)  # type: ignore[union-attr]
    return [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]


@lru_cache
def demo(quantization: str) -> LLM:
    return LLM(
        "demo",
        device="cpu",
        dtype="float32",
        num_pages=64,
        moe_expert_quantization=quantization,
        moe_quantization_group_size=32,
    )


@lru_cache
def perplexity(quantization: str) -> float:
    engine = demo(quantization).engine
    logprobs = torch.cat([token_logprobs(engine, window) for window in windows() if len(window) > 1])
    return math.exp(-logprobs.double().mean().item())


def test_held_out_perplexity_equals_transformers() -> None:
    assert len(HELD_OUT.read_bytes()) >= 20_000
    model = Qwen3MoeForCausalLM.from_pretrained(
        resolve_model("demo", "huggingface", None), dtype=torch.float32
    ).eval()
    logprobs = []
    with torch.inference_mode():
        for window in windows():
            if len(window) > 1:
                table = model(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
                logprobs.append(table.gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    expected = math.exp(-torch.cat(logprobs).double().mean().item())
    assert perplexity("none") == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("quantization", FORMATS)
def test_quantized_experts_keep_the_perplexity(quantization: str) -> None:
    assert perplexity("none") / 1.01 < perplexity(quantization) < FORMATS[quantization] * perplexity("none")
    assert perplexity(quantization) != perplexity("none")
