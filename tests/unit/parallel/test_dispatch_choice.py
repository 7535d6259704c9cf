"""Which dispatch auto means: what a record says, and reduce without one."""

from __future__ import annotations

from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.measured import read_entries
from minisgl.moe.exchange.choice import RECORD, fastest, write_record
from minisgl.resolve import Facts, resolve

RANKS = {"tensor_parallel_size": 2, "expert_parallel_size": 2}


def test_the_fastest_of_a_record(tmp_path: Path) -> None:
    record = tmp_path / "dispatch.json"
    assert fastest("A", 2, record)[0] == "reduce"
    write_record(
        "A", 2, {"reduce": {"1": 40.0, "64": 300.0}, "static": {"64": 150.0}, "dynamic": {"64": 1.0}}, record
    )
    write_record("A", 4, {"reduce": {"1": 40.0}, "static": {"64": 1.0}}, record)
    assert set(read_entries(record)) == {"A x2", "A x4"}
    name, why = fastest("A", 2, record)
    assert name == "static"
    assert "64 tokens a rank: static 150, reduce 300" in why
    assert fastest("A", 4, record)[0] == "reduce", "no number of tokens in common"
    assert fastest("B", 2, record)[0] == "reduce"


def test_the_record_that_ships_names_modes_measured_at_the_same_tokens() -> None:
    record = read_entries(RECORD)
    assert record
    for entry in record.values():
        assert set(entry) == {"reduce", "dynamic", "static"}
        assert len({frozenset(times) for times in entry.values()}) == 1


def test_auto_is_decided_once_and_an_explicit_dispatch_stays() -> None:
    facts = Facts(True, True, "bfloat16", 4096, dispatch=("static", "it was measured"))
    config, made = resolve(EngineConfig.from_kwargs(model="m", **RANKS), facts)
    assert config.parallel.moe_ep_dispatch == "static"
    assert ("--moe-ep-dispatch", "static", "it was measured") in [(d.flag, d.value, d.reason) for d in made]
    asked, _ = resolve(EngineConfig.from_kwargs(model="m", moe_ep_dispatch="dynamic", **RANKS), facts)
    assert asked.parallel.moe_ep_dispatch == "dynamic"
    alone, made = resolve(EngineConfig.from_kwargs(model="m"), facts)
    assert alone.parallel.moe_ep_dispatch == "auto"
    assert all(d.flag != "--moe-ep-dispatch" for d in made)
