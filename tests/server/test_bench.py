"""The load generator: what it plans, what it reports, and what it says of failures."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from minisgl.server import bench_client
from minisgl.server.bench_client import BenchConfig, plan


def test_arrivals_are_poisson_and_lengths_are_those_of_chats():
    planned = plan(BenchConfig(num_prompts=4000, rate=20.0, input_len=200, output_len=100))
    gaps = [b.at - a.at for a, b in itertools.pairwise(planned)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1), "as spread as they are long"
    for mean, lengths in (
        (200, [len(p.prompt.split()) for p in planned]),
        (100, [p.output_len for p in planned]),
    ):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.1)
        assert statistics.median(lengths) < 0.8 * mean
        assert max(lengths) > 5 * mean
    assert planned == plan(BenchConfig(num_prompts=4000, rate=20.0, input_len=200, output_len=100))
    assert planned != plan(BenchConfig(num_prompts=4000, rate=20.0, input_len=200, output_len=100, seed=1))


def test_a_run_ends_in_a_table_and_a_json_line(server, tmp_path, capsys):
    out = tmp_path / "runs.jsonl"
    config = BenchConfig(
        server.url, num_prompts=30, rate=100.0, input_len=20, output_len=12, json_out=str(out)
    )
    assert bench_client.main(config) == 0
    printed = capsys.readouterr().out
    for words in ("30 requests, 0 failed", "output tokens/s", "time to first token", "inter token latency"):
        assert words in printed
    result = json.loads(out.read_text())
    wanted = sum(p.output_len for p in plan(config, 4096))
    assert (result["model"], result["requests"], result["failed"]) == ("null", 30, 0)
    assert result["output_tokens"] == wanted
    assert result["seconds"] > plan(config)[-1].at
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]


def test_drawn_lengths_fit_the_context(server):
    config = BenchConfig(server.url, num_prompts=8, input_len=4000, output_len=4000)
    assert all(p.output_len <= 2048 for p in plan(config, 4096))
    assert all(1.5 * len(p.prompt.split()) + p.output_len <= 4096 for p in plan(config, 4096))


def test_a_trace_is_followed(server, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [{"prompt": "hello", "output_len": 3}, {"input_len": 5, "output_len": 2, "at": 0.2}]
    trace.write_text("\n".join(map(json.dumps, lines)))
    config = BenchConfig(server.url, trace=str(trace), json_out=str(tmp_path / "out"))
    assert [(p.at, len(p.prompt.split()), p.output_len) for p in plan(config)] == [(0, 1, 3), (0.2, 5, 2)]
    assert bench_client.main(config) == 0
    assert json.loads((tmp_path / "out").read_text())["output_tokens"] == 5
    trace.write_text('{"prompt": "x"}\nnonsense')
    with pytest.raises(ValueError, match="line 2"):
        plan(config)


def test_failures_are_told(server, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        json.dumps({"prompt": "x" * 5000, "output_len": 3}) + '\n{"prompt": "x", "output_len": 2}'
    )
    assert bench_client.main(BenchConfig(server.url, trace=str(trace))) == 1
    printed = capsys.readouterr().out
    assert "1 failed" in printed
    assert "context_length_exceeded" in printed or "maximum context length" in printed
    with pytest.raises(ValueError, match="no server answers"):
        bench_client.main(BenchConfig("http://127.0.0.1:1"))
