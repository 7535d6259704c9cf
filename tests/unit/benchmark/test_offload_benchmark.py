"""benchmark/offload.py: its graphs hold the forced routing, and a row whose caches fetched something else is no row."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl.engine.engine import Engine

pytest.importorskip("triton", reason="the benchmark compares with the store that Triton's kernels plan")
FOLDER = Path(__file__).parents[3] / "benchmark"
TINY = ["--shape", "tiny", "--no-resident", "--format", "none", "--context", "12", "--steps", "16"]


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("offload")
    monkeypatch.setattr(importlib.import_module("record"), "RESULTS", tmp_path)
    return module


def run(offload: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["offload.py", *TINY, *options])
    offload.main()


@pytest.mark.parametrize("batch", [1, 6])
def test_rows_fetch_what_the_definition_says(
    offload: ModuleType, batch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(offload, monkeypatch, "--slots", "8,6", "--batch", str(batch), "--prefill", "9")
    (record,) = (json.loads(line) for line in (tmp_path / "offload.jsonl").read_text().splitlines())
    assert [(row["slots"], row.get("routing")) for row in record["rows"]] == [
        (slots, kind) for slots in (8, 6) for kind in ("random", "local", None)
    ]
    for row in record["rows"]:
        assert "routing" not in row or row["bytes"] == pytest.approx(row["expected_bytes"], rel=0.05)


def test_a_routing_that_was_not_forced_is_refused(
    offload: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when graphs replay what the model's own routers choose. The row before it is kept."""
    checked, check_bytes = [], offload.check_bytes

    def check(row: dict[str, Any]) -> None:
        checked.append(row["routing"])
        monkeypatch.setattr(offload.ForcedBackend, "route", lambda self, *args: self._inner.route(*args))
        check_bytes(row)

    monkeypatch.setattr(offload, "check_bytes", check)
    with pytest.raises(SystemExit, match="not recorded"):
        run(offload, monkeypatch, "--slots", "8", "--routing", "random,local")
    (record,) = (json.loads(line) for line in (tmp_path / "offload.jsonl").read_text().splitlines())
    assert [row["routing"] for row in record["rows"]] == ["random"]
    assert checked == ["random", "local"]


def test_graphs_are_captured_when_the_routing_is_forced(
    offload: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those around the engine's own stores. Here a graph only remembers who routed and what held the weights."""

    class Graph:
        def __init__(self, engine: Engine) -> None:
            layers = engine.decoder.moe_layers().values()
            self.held = [(layer.backend, layer.store) for layer in layers]
            self.used = 0

        def run(self, arrays: Any) -> None:
            self.used += 1

        def close(self) -> None:
            pass

    made: list[Graph] = []

    def capture(engine: Engine) -> Graph:
        made.append(Graph(engine))
        return made[-1]

    monkeypatch.setattr(Engine, "_make_graphs", capture)
    monkeypatch.setattr(offload.torch.cuda, "empty_cache", lambda: None)
    run(offload, monkeypatch, "--slots", "8,6", "--routing", "random")
    first, own, other = made
    assert not first.used and own.used and other.used, "the engine's first graphs route by themselves"
    for graph in (own, other):
        assert all(isinstance(backend, offload.ForcedBackend) for backend, _ in graph.held)
    assert [store for _, store in first.held] == [store for _, store in own.held], "the engine's own stores"
    assert {store.num_slots for _, store in other.held} == {6}
