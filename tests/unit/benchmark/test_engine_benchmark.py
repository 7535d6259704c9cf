"""What benchmark/engine.py makes of a trace, and of another engine that is stopped."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmark.engine_peer import best_steps, run_apart
from benchmark.engine_profile import SAMPLER_KERNEL, STEP_KERNEL, Breakdown, breakdown, read_spans
from tests.e2e.model_factory import make_model


def write_trace(path: Path, spans: list[tuple[str, float, float]]) -> Path:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 999},
        {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 1},
        *(
            {"ph": "X", "cat": "kernel", "name": n, "ts": start, "dur": end - start}
            for n, start, end in spans
        ),
    ]
    with gzip.open(path, "wt", encoding="utf-8") as out:
        json.dump({"traceEvents": events}, out)
    return path


def test_idle_time_inside_and_between_steps(tmp_path: Path) -> None:
    one = [
        (STEP_KERNEL, 0.0, 10.0),
        ("gemm", 12.0, 40.0),  # 2 idle inside of the graph
        ("gemm", 35.0, 60.0),  # overlaps by 5
        (SAMPLER_KERNEL, 64.0, 70.0),  # 4 idle between steps
        ("Memcpy DtoH", 71.0, 73.0),  # 1
        ("Memcpy HtoD", 90.0, 91.0),  # 17
    ]  # and 9 before the next step at 100
    spans = [(name, start + 100 * n, end + 100 * n) for n in range(3) for name, start, end in reversed(one)]
    found = breakdown(read_spans(write_trace(tmp_path / "trace.json.gz", spans)))
    assert (found.num_steps, found.step_us) == (2, 100.0)
    assert found.busy_us == pytest.approx(67.0)
    assert found.idle_percent == pytest.approx(33.0)
    assert found.between_percent == pytest.approx(31.0)
    assert found.kernels["gemm"] == pytest.approx((53.0, 2.0))
    assert list(found.record(most=1)["kernels"]) == ["gemm"]
    assert found.table().row_count == 5


def test_a_trace_without_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match="--cuda-graph-max-bs 0"):
        breakdown([])
    assert Breakdown(1, 10.0, 10.0, 0.0, {}).idle_percent == 0.0


@pytest.mark.slow
def test_transformers_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    options = ["--config", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--batch", "2"]
    rows = run_apart([*options, "--input", "6", "--output", "4"], limit_s=200)
    assert best_steps(rows)[2] > 0
    assert rows[0]["compiled"] is False
    assert rows[0]["peer"].startswith("transformers")
    stopped = run_apart([*options, "--output", "100000"], limit_s=1)
    assert stopped == [{"error": "stopped after 1 s"}]


def test_the_fastest_way_counts() -> None:
    rows = [{"batch": 1, "step_s": 3.0}, {"batch": 8, "error": "no"}, {"batch": 1, "step_s": 2.0}]
    assert best_steps(rows) == {1: 2.0}
