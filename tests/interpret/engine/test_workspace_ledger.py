"""The workspace line of the ledger: taken once at the start, as large as predicted, and enough for every step after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.engine.memory import predict_ledger, setup_of, workspace_bytes
from minisgl.models.sizes import model_sizes
from tests.e2e.model_factory import make_model, make_prompts


@pytest.mark.parametrize("options", [{}, {"moe_expert_offload": True, "moe_expert_cache_size": 3}])
def test_no_step_needs_more_than_what_was_reserved(tmp_path: Path, options: dict[str, Any]) -> None:
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(
        str(tmp_path),
        device="cpu",
        num_pages=40,
        moe_backend="fused",
        moe_expert_quantization="int8",
        max_prefill_length=24,
        **options,
    )
    engine = llm.engine
    sizes, setup = model_sizes(engine.spec), setup_of(engine.config)
    before = engine.ledger()
    assert before.line("workspace") == workspace_bytes(sizes, setup) > 0
    predicted = predict_ledger(sizes, setup)
    assert {line.name: line.num_bytes for line in before.lines} == {
        line.name: line.num_bytes for line in predicted.lines if line.name != "one step"
    }
    llm.generate(make_prompts([40, 2]), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert engine.ledger() == before, "a prompt of two chunks and a decode step fit into it"
