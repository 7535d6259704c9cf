"""benchmark/eviction.py: files of block hashes, the replay, Belady's choice, and the command line."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.eviction import EvictionConfig, make_policy

BENCHMARK = Path(__file__).parents[3] / "benchmark"

# Qwen-Bailian: seconds, blocks of 16 tokens, the conversation's ids. 37 tokens are two whole blocks and a part of a third.
BAILIAN = [
    {"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 37, "output_length": 9, "type": "text", "turn": 1,
     "hash_ids": [901, 902, 903]},
    {"chat_id": 8, "parent_chat_id": 7, "timestamp": 61.25, "input_length": 64, "output_length": 3, "type": "text", "turn": 2,
     "hash_ids": [901, 902, 17, 5]},
]  # fmt: skip
# Mooncake: milliseconds, blocks of 512 tokens. 1600 tokens are three whole blocks and a part of a fourth.
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1600, "output_length": 52, "hash_ids": [46, 47, 48, 49]},
    {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [46, 50]},
]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARK)
    return importlib.import_module("eviction_traces")


@pytest.fixture
def replays(traces: ModuleType) -> ModuleType:
    return importlib.import_module("eviction_replay")


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_a_qwen_bailian_file(traces: ModuleType, tmp_path: Path):
    trace = traces.load(write(tmp_path / "to_c.jsonl", BAILIAN))
    assert (trace.name, trace.block_tokens) == ("to_c", 16)
    first, second = trace.requests
    assert (first.time, second.time) == (0.5, 61.25)
    assert (first.num_prompt, second.num_prompt) == (2, 4)
    assert first.blocks == second.blocks[:2]
    assert len({*first.blocks, *second.blocks}) == 4


def test_a_mooncake_file(traces: ModuleType, tmp_path: Path):
    trace = traces.load(write(tmp_path / "chat.jsonl", MOONCAKE))
    assert trace.block_tokens == 512
    first, second = trace.requests
    assert (first.time, second.time) == (0.0, 3.0), "in the order of time, in seconds"
    assert (first.num_prompt, second.num_prompt) == (2, 3)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] not in second.blocks


def test_blocks_and_limit_can_be_given(traces: ModuleType, tmp_path: Path):
    path = write(tmp_path / "x.jsonl", MOONCAKE)
    trace = traces.load(path, block_tokens=1024, limit=1)
    assert trace.block_tokens == 1024
    assert [request.num_prompt for request in trace.requests] == [1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2"),
        ('{"timestamp": 1, "input_length": 3}', "line 2: no 'hash_ids'"),
        ('{"timestamp": "1", "input_length": 3, "hash_ids": []}', "line 2: timestamp is '1'"),
        ('{"timestamp": 1, "input_length": 3, "hash_ids": 4}', "line 2: hash_ids is 4"),
        ("[1, 2]", "line 2"),
    ],
)
def test_a_line_that_is_none_is_named(traces: ModuleType, tmp_path: Path, line: str, words: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=words):
        traces.load(path)


def test_an_empty_file_is_refused(traces: ModuleType, tmp_path: Path):
    with pytest.raises(ValueError, match="holds no requests"):
        traces.load(write(tmp_path / "empty.jsonl", []))


def small(traces: ModuleType, prompts: list[tuple[int, ...]]):
    requests = [traces.Request(float(i), blocks, len(blocks)) for i, blocks in enumerate(prompts)]
    return traces.Trace("small", 2, requests)


def test_replay_and_belady_by_hand(traces: ModuleType, replays: ModuleType):
    """Two pages, prompts 1 2 3 1 2 3 ...: lru never finds one; whoever knows the future does twice."""
    trace = small(traces, [(1,), (2,), (3,), (1,), (2,), (3,)])
    lru = replays.replay(trace, make_policy(), 2)
    assert (lru.prompt_tokens, lru.hit_tokens, lru.recomputed_tokens, lru.num_evicted) == (12, 0, 12, 4)
    assert lru.cost == 6 * 2 * (0 + 2 / 2)
    # miss 1, 2, 3 (2 goes, its use is furthest), hit 1 (unused from now on), miss 2 (1 goes), hit 3
    best = replays.belady(trace, 2)
    assert (best.hit_tokens, best.num_evicted) == (4, 2)


@pytest.mark.parametrize("name", ["zipf", "chat", "scan", "phases"])
def test_nobody_beats_belady(traces: ModuleType, replays: ModuleType, name: str):
    trace = traces.TRACES[name](1)
    trace = traces.Trace(name, 1, trace.requests[:300])
    best = replays.belady(trace, 600)
    for policy in ("lru", "lfu", "cost-aware", "adaptive"):
        result = replays.replay(trace, make_policy(EvictionConfig(policy=policy)), 600)
        assert result.prompt_tokens == best.prompt_tokens
        assert 0 < result.hit_tokens <= best.hit_tokens


@pytest.fixture
def command(traces: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmark/eviction.py, with its records in tmp_path."""
    monkeypatch.setattr(importlib.import_module("record"), "RESULTS", tmp_path)
    return importlib.import_module("eviction")


def test_a_file_through_every_policy(command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Table, record, picture."""
    pytest.importorskip("matplotlib", reason="--plot is an extra: pip install 'minisgl[plot]'")
    lines = [{**MOONCAKE[i % 2], "timestamp": 1000 * i} for i in range(40)]
    path = write(tmp_path / "mooncake.jsonl", lines)
    assert command.main([str(path), "--pages", "4", "--record", "--plot", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr().out
    for word in (
        "lru-k",
        "frequency-decay",
        "cost-aware",
        "belady",
        "adaptive against the best single policy",
    ):
        assert word in shown
    assert (tmp_path / "plots" / "eviction_mooncake.png").stat().st_size > 5000
    record = json.loads((tmp_path / "eviction.jsonl").read_text())
    assert (record["case"], record["pages"], record["block_tokens"]) == ("mooncake", 4, 512)
    assert record["policies"]["belady"]["hit_tokens"] >= record["policies"]["lru"]["hit_tokens"] > 0
    assert record["policies"]["adaptive"]["weights"]


def test_check_fails_where_adaptive_is_behind(command: ModuleType, monkeypatch: pytest.MonkeyPatch):
    trace = command.TRACES["zipf"](0)
    monkeypatch.setitem(command.TRACES, "zipf", lambda seed: replace(trace, requests=trace.requests[:20]))
    monkeypatch.setattr(command, "against_best", lambda results: {"hits": 0.94, "work": 1.0})
    monkeypatch.setattr(command, "run", lambda trace, args: [command.belady(trace, args.pages)])
    assert command.main(["zipf", "--check", "--json"]) == 1
    monkeypatch.setattr(command, "against_best", lambda results: {"hits": 0.96, "work": 1.0})
    assert command.main(["zipf", "--check", "--json"]) == 0


@pytest.mark.parametrize(
    ("args", "words"), [(["nonsense"], "no trace"), (["zipf", "--pages", "0"], "--pages 0")]
)
def test_nonsense_is_refused(command: ModuleType, capsys: pytest.CaptureFixture, args: list[str], words: str):
    with pytest.raises(SystemExit):
        command.main(args)
    assert words in capsys.readouterr().err
