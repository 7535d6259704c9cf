"""What a rank holds is what the plan says it will, line by line, with experts in host memory too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM
from minisgl.engine.memory import predict_ledger, setup_of
from minisgl.models.sizes import model_sizes, shard_sizes
from tests.e2e.model_factory import make_model


@pytest.mark.parametrize(
    "options",
    [{}, {"expert_parallel_size": 2, "moe_expert_offload": True, "moe_expert_cache_size": 3}],
    ids=["tp", "ep, offload"],
)
def test_every_line_of_a_rank(tmp_path: Path, options: dict[str, Any]) -> None:
    make_model(tmp_path, "qwen3_moe")
    with LLM(str(tmp_path), device="cpu", num_pages=20, tensor_parallel_size=2, **options) as llm:
        engine = llm.engine
        sizes = shard_sizes(model_sizes(engine.spec), 2, "expert_parallel_size" in options)
        predicted = predict_ledger(sizes, setup_of(engine.config))
        actual = {line.name: line.num_bytes for line in engine.ledger().lines}
    assert actual == {line.name: line.num_bytes for line in predicted.lines if line.name != "one step"}
