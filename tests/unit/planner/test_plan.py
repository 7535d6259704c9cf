"""Plans: what is recommended, that its command line is one the engine takes, and what is said about the rest."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.engine.memory import GIB, DoesNotFit, Setup, predict_ledger
from minisgl.flags import add_flags, iter_flags, parse_bytes
from minisgl.planner import (
    add_env_arguments,
    add_plan_arguments,
    apply_auto,
    explain_misfit,
    run_env,
    run_plan,
)
from minisgl.planner import features as feature_table
from minisgl.planner.breakdown import breakdown
from minisgl.planner.candidates import make_plan
from minisgl.planner.env import driver_report
from minisgl.planner.features import Feature
from minisgl.planner.gpus import GPUS
from minisgl.planner.machine import Machine, named_machine, this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import OFFERED, Candidate, Plan, Request
from minisgl.planner.predict import (
    HOST_COPY_GBPS,
    LAUNCH_US,
    LINK_KERNEL_SHARE,
    LOCAL_HITS,
    MOE_LAYER_US,
    MOE_PREFILL_TFLOPS,
    MOE_RUN_TBPS,
    SHARES,
    STEP_BOUND_MS,
    STEP_LAYERS,
    STEP_MS,
    decode_ms,
    launch_us,
    local_hit_rate,
    miss_gbps,
    prefill_seconds,
    random_hit_rate,
)
from minisgl.planner.report import plan_dict, print_plan
from minisgl.planner.units import gib
from tests.unit.planner import configs

QWEN = read_numbers(configs.QWEN3_30B_A3B)
RECORDS = Path(__file__).parents[3] / "benchmark" / "results"


def machine(name: str, host_gib: float = 64, **changes: Any) -> Machine:
    return replace(named_machine(name, None, int(host_gib * GIB), SHARES), **changes)


def cpu_only(host_gib: float = 64) -> Machine:
    here = named_machine("RTX 5070", None, int(host_gib * GIB), SHARES)
    return replace(
        here, gpu=None, gpu_bytes=0, gpu_used=0, capability=(0, 0), host_read_gbps=40.0, host_tflops=1.0
    )


def plan_on(where: Machine, config: dict[str, Any] = configs.QWEN3_30B_A3B, **request: Any) -> Plan:
    return make_plan(read_numbers(config), where, Request("some/model", **request))


def engine_options(command: str) -> dict[str, Any]:
    """A command line, parsed as the commands of the package parse theirs."""
    parser = argparse.ArgumentParser()
    add_flags(parser, [item for _, item in iter_flags(EngineConfig)], "flags")
    words = command.split()
    assert words[:4] == ["python", "-m", "minisgl", "serve"]
    return vars(parser.parse_args(words[4:]))


# --- recommendations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "expected"), [("H200", "none"), ("RTX 5090", "int4"), ("RTX 4090", "int4"), ("L40S", "int8")]
)
def test_the_most_precise_format_that_fits_is_recommended(gpu: str, expected: str) -> None:
    plan = plan_on(machine(gpu, host_gib=8))  # too little for experts
    assert plan.recommended is not None and plan.candidates[0] is plan.recommended
    assert plan.recommended.setup.weight_format == expected
    assert plan.recommended.usable and plan.recommended.setup.num_slots is None
    config = EngineConfig.from_kwargs(**engine_options(plan.command(plan.recommended)))
    assert config.kernel.moe_expert_quantization == (expected if expected != "none" else "auto")
    assert plan.recommended.kv_tokens >= 32_768
    budget = plan.machine.gpu_bytes * 0.9 - plan.machine.gpu_used
    assert plan.recommended.ledger.on("device") + plan.recommended.left == pytest.approx(budget, abs=1)


def cached(plan: Plan) -> list[Candidate]:
    return [c for c in plan.candidates if c.setup.num_slots is not None]


@pytest.mark.parametrize("host_gib", [32, 64])
def test_a_card_of_12_gib_gets_a_cache_of_experts(host_gib: int) -> None:
    plan = plan_on(machine("RTX 5070", host_gib))
    best = plan.recommended
    assert best is not None and best.verdict == "recommended" and best is plan.candidates[0]
    assert best.setup.weight_format == "int4" and best.setup.num_slots is not None
    assert 30 <= best.setup.num_slots < 60 and not best.setup.staged and best.kv_tokens >= 32_768
    options = engine_options(plan.command(best))
    config = EngineConfig.from_kwargs(**options)
    assert config.offload.moe_expert_offload and config.offload.num_slots == best.setup.num_slots
    assert config.offload.moe_offload_mode == "device"
    assert config.kernel.moe_expert_quantization == "int4"
    budget = int(12 * GIB * 0.9) - plan.machine.gpu_used
    one_more = replace(best.setup, num_slots=best.setup.num_slots + 1)
    assert best.ledger.on("device") <= budget < predict_ledger(plan.sizes, one_more).on("device")
    assert all(c.local.decode_ms <= c.worst.decode_ms for c in cached(plan))
    resident = [c for c in plan.candidates if c.setup.num_slots is None]
    assert resident and all("lacks" in c.verdict and "device memory" in c.verdict for c in resident)
    formats = {c.setup.weight_format for c in cached(plan) if c.usable}
    assert {"int4", "mxfp4", "fp8", "int8"} <= formats if host_gib == 64 else "none" not in formats


def test_a_small_prompt_step_is_weighed_against_slots() -> None:
    """A prompt streams every expert once a step, so more slots are not worth steps of 512 tokens."""
    best = plan_on(machine("RTX 5070")).recommended
    assert best is not None and best.setup.max_prefill_length >= 2048
    asked = plan_on(machine("RTX 5070"), given={"max_prefill_length": 512}).recommended
    assert asked is not None and asked.setup.num_slots is not None and best.setup.num_slots is not None
    assert asked.setup.num_slots > best.setup.num_slots
    assert asked.local.decode_ms < best.local.decode_ms and asked.local.answer_s > best.local.answer_s


def test_experts_that_cannot_all_be_pinned_are_planned_by_the_host() -> None:
    plan = plan_on(machine("RTX 5070", 64, pinnable_bytes=10 * GIB))
    assert cached(plan) and all(c.setup.staged for c in cached(plan))
    best = plan.recommended
    assert best is not None and "--moe-offload-mode staged" in plan.command(best)
    assert best.label.endswith("on GPU, staged") and best.ledger.line("CUDA graphs") == 0
    pinned = plan_on(machine("RTX 5070", 64)).recommended
    assert pinned is not None and best.local.decode_ms > 1.5 * pinned.local.decode_ms
    asked = plan_on(machine("RTX 5070", 64, pinnable_bytes=10 * GIB), given={"moe_offload_mode": "device"})
    assert not any(c.fits for c in cached(asked))
    assert any("host memory" in c.verdict for c in cached(asked))


def test_a_host_too_small_says_so() -> None:
    plan = plan_on(machine("RTX 5070", 12))
    assert plan.recommended is None
    assert any("lacks" in c.verdict and "of host memory" in c.verdict for c in cached(plan))


def test_one_line_makes_a_feature_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(feature_table.FEATURES, "expert-offload", Feature(False, "not in this version"))
    plan = plan_on(machine("RTX 5070"))
    assert plan.recommended is None
    assert all(c.lacks == ("not in this version",) for c in cached(plan))


def test_flags_of_a_cache_are_kept() -> None:
    eight = plan_on(machine("RTX 5070"), given={"moe_expert_cache_size": "8"})
    assert {c.setup.num_slots for c in eight.candidates} == {8}, "a number of slots means a cache"
    best = eight.recommended
    assert best is not None
    options = engine_options(eight.command(best))
    assert (options["moe_expert_offload"], options["moe_expert_cache_size"]) == (True, "8")
    forced = plan_on(machine("H200"), given={"moe_expert_offload": True})
    assert cached(forced) and len(cached(forced)) == len(forced.candidates), "though everything would fit"
    staged = plan_on(machine("RTX 5070"), given={"moe_offload_mode": "staged"})
    assert all(c.setup.staged for c in cached(staged))
    large = plan_on(machine("RTX 5070"), given={"moe_expert_cache_size": "500", "moe_expert_offload": True})
    assert {c.setup.num_slots for c in large.candidates} == {None}, (
        "the engine drops a cache that holds everything"
    )


def test_steps_shrink_before_precision_does() -> None:
    def best(gib: float, **request: Any) -> Candidate:
        found = plan_on(machine("RTX 4090", host_gib=8, gpu_bytes=int(gib * GIB)), **request).candidates[0]
        assert found.fits and found.setup.weight_format == "int4" and found.setup.num_slots is None
        return found

    assert best(30).options == {"moe_expert_quantization": "int4"}
    steps = [best(gib).setup for gib in (30, 25, 24, 23.6, 23.2)]
    sizes = [(setup.max_prefill_length, setup.max_running_requests) for setup in steps]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1][0] < 4096
    kept = best(25, given={"max_prefill_length": 8192})
    assert "max_prefill_length" not in kept.options and kept.setup.max_prefill_length == 8192


def test_given_options_are_kept() -> None:
    plan = plan_on(
        machine("H200"), given={"moe_expert_quantization": "fp8", "memory_ratio": 0.5, "page_size": 64}
    )
    assert {c.setup.weight_format for c in plan.candidates} == {"fp8"}
    assert plan.recommended is not None
    options = engine_options(plan.command(plan.recommended))
    assert (options["memory_ratio"], options["page_size"]) == (0.5, 64)
    with pytest.raises(ValueError, match="memory-ratio"):
        plan_on(machine("H200"), given={"memory_ratio": 2.0})


def test_more_context_or_requests_take_more_memory() -> None:
    one = plan_on(machine("H200"), context=8192).candidates[0]
    four = plan_on(machine("H200"), context=8192, concurrency=4).candidates[0]
    assert four.ledger.line("KV pages") - one.ledger.line("KV pages") == 3 * 8192 * 98_304
    capped = plan_on(machine("H200"), context=10**6)
    assert capped.request.context == 40_960


def test_cpu_plans() -> None:
    plan = plan_on(cpu_only(64))
    assert plan.recommended is not None and not plan.recommended.setup.on_cuda
    assert plan.recommended.setup.dtype is torch.float32 and plan.recommended.setup.weight_format == "int8"
    assert "--device" not in plan.command(plan.recommended), "without a GPU a CPU is what auto takes"
    both = plan_on(machine("H200", host_gib=300, host_read_gbps=40.0, host_tflops=1.0))
    cpu = [c for c in both.candidates if not c.setup.on_cuda]
    assert cpu and all("--device cpu" in both.command(c) for c in cpu)
    assert all("slower" in c.verdict for c in cpu if c.fits)
    tight = plan_on(cpu_only(64), context=40_960, concurrency=3).recommended
    assert tight is not None and tight.options["num_pages"] == 3 * 2560 + 1
    with pytest.raises(ValueError, match="nothing to plan for"):
        plan_on(cpu_only(), given={"device": "cuda"})


def test_impossible_formats_say_why() -> None:
    plan = plan_on(machine("RTX 3090"), configs.OLMOE_1B_7B)
    reasons = {c.setup.weight_format: c.verdict for c in plan.candidates if c.impossible}
    assert "compute capability 8.9" in reasons["fp8"]
    odd = {**configs.QWEN3_30B_A3B, "moe_intermediate_size": 720}
    reasons = {
        c.setup.weight_format: c.verdict for c in plan_on(machine("H200"), odd).candidates if c.impossible
    }
    assert "multiple of" in reasons["int4"]


def test_what_this_version_cannot_run_is_marked() -> None:
    glm = plan_on(machine("H200"), configs.GLM_45_AIR)
    assert glm.recommended is None and any(c.fits for c in glm.candidates)
    assert all("this architecture is not served" in c.lacks for c in glm.candidates)


def test_several_gpus() -> None:
    given = {"tensor_parallel_size": 2}
    two = plan_on(machine("L40S"), given=given)
    assert two.recommended is not None and two.recommended.label == "bfloat16, all on GPU"
    options = engine_options(two.command(two.recommended))
    assert options["tensor_parallel_size"] == 2 and "expert_parallel_size" not in options
    whole = next(c for c in plan_on(machine("L40S")).candidates if c.label == "bfloat16, all on GPU")
    assert not whole.fits
    spread = plan_on(machine("L40S"), given={**given, "expert_parallel_size": 2})
    assert spread.recommended is not None
    assert "--tp 2 --expert-parallel-size 2" in spread.command(spread.recommended)
    assert spread.sizes.num_experts == 64 and two.sizes.num_experts == 128
    small = plan_on(machine("RTX 5070", 64), given={**given, "moe_expert_quantization": "fp8"})
    assert small.recommended is not None and small.recommended.setup.num_slots is not None
    assert small.machine.pinnable_bytes == 31 * GIB, "ranks share the host"
    with pytest.raises(ValueError, match="expert-parallel-size=3"):
        plan_on(machine("L40S"), given={**given, "expert_parallel_size": 3})


def test_quantized_checkpoints() -> None:
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fp8 = plan_on(machine("H200"), {**configs.QWEN3_30B_A3B, "quantization_config": quantized})
    assert {c.setup.weight_format for c in fp8.candidates} == {"fp8_block", "fp8", "int4", "mxfp4"}
    best = fp8.recommended
    assert best is not None and best.lacks == () and best.setup.weight_format == "fp8_block"
    assert "--moe-expert-quantization" not in fp8.command(best), "it stays as it is"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}
    four = plan_on(machine("RTX 5070"), {**configs.QWEN3_30B_A3B, "quantization_config": gptq})
    best = four.recommended
    assert best is not None and (best.setup.weight_format, best.setup.group_size) == ("int4_asym", 64)
    odd = {**configs.QWEN3_30B_A3B, "quantization_config": {"quant_method": "vptq"}}
    assert all("'vptq' are unknown" in c.verdict for c in plan_on(machine("H200"), odd).candidates)


def test_dense_models() -> None:
    config = {**configs.QWEN3_30B_A3B, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28}
    dense = {key: value for key, value in config.items() if "expert" not in key and "moe" not in key}
    plan = plan_on(machine("RTX 4090"), dense)
    assert len(plan.candidates) == 1 and plan.candidates[0].label == "bfloat16 on GPU"
    assert plan.recommended is plan.candidates[0]


# --- speed -------------------------------------------------------------------------------------------------------------


def test_hit_rates() -> None:
    for slots, rate in LOCAL_HITS[1:]:
        assert local_hit_rate(slots, 128, 8) == pytest.approx(rate)
    assert local_hit_rate(16, 128, 8) == pytest.approx((0.366 + 0.741) / 2)
    assert local_hit_rate(4, 128, 8) == random_hit_rate(4, 128, 8) == 0.0, "fewer slots than a token uses"
    assert local_hit_rate(32, 64, 6) == local_hit_rate(64, 128, 8), "scaled by the share of experts"
    assert local_hit_rate(200, 128, 8) == random_hit_rate(200, 128, 8) == 1.0
    assert random_hit_rate(8, 128, 8) == 0.0625


def test_measured_steps_are_predicted() -> None:
    """Offloaded and resident decode steps on an H200, at the hit rates they had."""
    records = {row["name"]: row for row in result_lines("limits")}
    offloaded = records["offloaded-decode"]
    where = machine("H200", link_gbps=offloaded["link_gbps"])
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=40_960)
    for weight_format, slots, _, hits, measured in offloaded["value"]:
        cached = replace(setup, weight_format=weight_format, num_slots=slots)
        assert decode_ms(QWEN.sizes, cached, where, 1024, hits) == pytest.approx(measured, rel=0.08)
    assert decode_ms(QWEN.sizes, setup, where, 150, 1.0) == pytest.approx(STEP_MS, rel=0.05)


def test_the_link_bound_is_bytes_by_miss_rate_by_bandwidth() -> None:
    """Figures of an fp8 and a 4-bit cache at about 51 GB/s: 33.3 ms with 8 slots and random routing, 2.0 ms at 89.4 % hits."""
    where = machine("H200", link_gbps=51 / LINK_KERNEL_SHARE)
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=40_960)
    for weight_format, slots, hits, expected in (("fp8", 8, 0.0625, 33.3), ("int4", 49, 0.894, 2.0)):
        cached = replace(setup, weight_format=weight_format, num_slots=slots)
        missed = 48 * 8 * QWEN.sizes.record_bytes(weight_format, torch.bfloat16) * (1 - hits)
        link = missed / miss_gbps(QWEN.sizes, cached, where) / 1e6
        assert link == pytest.approx(expected, rel=0.01)
        slower = decode_ms(QWEN.sizes, cached, replace(where, link_gbps=where.link_gbps / 2), 0, hits)
        assert slower - decode_ms(QWEN.sizes, cached, where, 0, hits) == pytest.approx(link, rel=0.01)


def test_resident_decode_reads_weights_once() -> None:
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=40_960)
    where = machine("H200")
    launches = 48 * sum(launch_us("none")) / 1e3
    read = (QWEN.sizes.active_params - QWEN.sizes.params["embedding"]) * 2
    assert decode_ms(QWEN.sizes, setup, where, 0, 1.0) == pytest.approx(
        launches + read / where.read_gbps / 1e6
    )
    measured_ms, measured_bound = STEP_MS, STEP_BOUND_MS
    assert measured_bound < measured_ms < decode_ms(QWEN.sizes, setup, where, 150, 1.0) * 1.05
    longer = decode_ms(QWEN.sizes, setup, where, 10_000, 1.0) - decode_ms(QWEN.sizes, setup, where, 0, 1.0)
    assert longer == pytest.approx(10_000 * 98_304 / where.read_gbps / 1e6)
    windowed = read_numbers(configs.GPT_OSS_20B).sizes
    near, far = (decode_ms(windowed, setup, where, n, 1.0) for n in (20_000, 40_000))
    assert far - near == pytest.approx(20_000 * 12 * 2048 / where.read_gbps / 1e6), (
        "half of the layers stop at 128"
    )


def test_prefill_streams_what_is_not_resident_once_a_chunk() -> None:
    """Experts of Qwen3-30B-A3B in fp8 take 0.57 s over a 51 GB/s link."""
    fast = machine("H200", link_gbps=51.0, read_gbps=1e9, tflops=1e9)
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=40_960, weight_format="fp8", num_slots=8)
    one = prefill_seconds(QWEN.sizes, replace(setup, num_slots=1), fast, 8192)
    assert one == pytest.approx(0.57 * 127 / 128, rel=0.01)
    assert prefill_seconds(QWEN.sizes, replace(setup, num_slots=1), fast, 16_384) == pytest.approx(2 * one)
    assert prefill_seconds(QWEN.sizes, setup, fast, 8192) < one
    resident = replace(setup, num_slots=None)
    assert prefill_seconds(QWEN.sizes, resident, fast, 8192) < 0.1


def result_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / f"{name}.jsonl").read_text().splitlines()]


def test_constants_have_records() -> None:
    records = {row["name"]: row for row in result_lines("limits")}
    source = Path(__file__).parents[3] / "python" / "minisgl" / "planner" / "predict.py"
    named = [
        line.split("source: ")[1].split(",")[0].strip(' "')
        for line in source.read_text().splitlines()
        if "source: " in line
    ]
    own = {f"moe.jsonl {row['time']}" for row in result_lines("moe")}
    assert named and set(named) <= records.keys() | own
    assert records["triton-launch"]["value"] == LAUNCH_US and records["host-copy"]["value"] == HOST_COPY_GBPS
    moe = {row["time"]: row for row in result_lines("moe")}
    tuned = moe["2026-11-30T00:17:40+00:00"]
    rows = {(row["format"], row["num_tokens"]): row for row in tuned["results"]}
    for name, us in MOE_LAYER_US.items():
        assert us == pytest.approx(rows["bf16" if name == "none" else name, 1]["us"], abs=0.01)
    for name, tflops in MOE_PREFILL_TFLOPS.items():
        assert tflops == rows["bf16" if name == "none" else name, 4096]["tflop_per_s"]
    assert tuned["measured_tb_per_s"] == MOE_RUN_TBPS
    step = records["decode-step"]["value"]
    assert (step["step_ms"], step["bound_ms"], step["layers"]) == (STEP_MS, STEP_BOUND_MS, STEP_LAYERS)
    assert SHARES.read == pytest.approx(records["hbm-read"]["value"] / 4.8)
    assert SHARES.link == pytest.approx(records["pinned-h2d"]["value"] / 63)
    assert LOCAL_HITS[1:] == tuple(map(tuple, records["local-routing"]["value"]))


# --- commands ----------------------------------------------------------------------------------------------------------


def run(tmp_path: Path, *words: str, config: dict[str, Any] = configs.QWEN3_30B_A3B) -> int:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return run_plan(parser.parse_args(["--model", str(path), *words]))


def test_plan_prints_a_command_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--gpu", "GeForce RTX 4090", "--host-memory", "32GiB") == 0
    out = capsys.readouterr().out
    assert "30.53 G weights" in out and "98,304 bytes" in out and "recommended" in out
    command = next(
        line.strip() for line in out.splitlines() if line.strip().startswith("python -m minisgl serve")
    )
    EngineConfig.from_kwargs(**engine_options(command))
    assert run(tmp_path, "--gpu", "RTX 4060", "--host-memory", "8GiB") == 1
    assert "Nothing that this version runs fits" in capsys.readouterr().out


def test_the_breakdown_names_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(tmp_path, "--gpu", "RTX 5070", "--host-memory", "64GiB", "--moe-expert-quantization", "fp8") == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "attention", "router", "experts on the host", "scales of experts", "embedding", "head", "workspace, steps of",
        "CUDA graphs", "CUDA context, other processes", "kept free by --memory-ratio", "transient experts", "KV cache, a token",
        "KV cache, 1 x 32,768 tokens", "a cache of 8 experts a layer as fp8 │ 1.69 GiB", "a cache of 32 experts a layer",
    ):  # fmt: skip
        assert words in out, words
    for candidate in plan_on(machine("RTX 5070")).candidates:
        pieces = breakdown(QWEN.sizes, candidate.setup, candidate.ledger)
        assert sum(piece.num_bytes for piece in pieces) == candidate.ledger.total
        assert {p.where for p in pieces} == {line.where for line in candidate.ledger.lines}


def test_json_has_every_candidate_and_no_infinities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(tmp_path, "--gpu", "RTX 3090", "--link-gbps", "12.5", "--json", config=configs.OLMOE_1B_7B) == 1
    )
    out = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert out["machine"]["link_gbps"] == 12.5 and out["model"]["not_served"]
    assert {c["label"].split(",")[0] for c in out["candidates"]} == {"bfloat16", *OFFERED[1:]}
    assert out["model"]["total_params"] == sum(out["model"]["params"].values())


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled question of a first run: no flag at all."""
    tiny = {**configs.QWEN3_30B_A3B, "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1000}
    assert run(tmp_path, "--json", config=tiny) == 0
    here = json.loads(capsys.readouterr().out)["machine"]
    assert here["measured"] and here["host_bytes"] > 0
    machine = this_machine(measure=False)
    assert machine.pinnable_bytes <= machine.host_bytes and machine.host_read_gbps == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu-memory", "12 potatoes"), "--gpu-memory '12 potatoes' is not a size"),
        (("--host-memory", "0GiB"), "more than nothing"),
        (("--gpu", "Voodoo 2"), "known are .*RTX 5070"),
        (("--link-gbps", "fast"), "is not a rate"),
        (("--link-gbps", "-3"), "is not a rate"),
        (("--context", "0"), "--context 0 must be at least 1"),
        (("--gpu", "H200", "--tp", "5"), "can't be divided among 5 GPUs"),
        (("--gpu", "H200", "--tp", "0"), "--tp=0 must be at least 1"),
        (
            ("--gpu", "H200", "--tp", "4", "--expert-parallel-size", "2"),
            "--expert-parallel-size=2 must be 1 or",
        ),
        (("--gpu", "H200", "--moe-expert-cache-size", "many"), "use auto or at least 1 slot"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *words)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    for text, message in (("{", "not valid JSON"), ("[]", "no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            run_plan(parser.parse_args(["--model", str(tmp_path / "config.json"), "--gpu", "H200"]))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="is missing"):
        run_plan(parser.parse_args(["--model", str(tmp_path), "--gpu", "H200"]))


def test_sizes_as_people_write_them() -> None:
    assert parse_bytes("12GiB", "--x") == parse_bytes(" 12 g ", "--x") == 12 * 2**30
    assert parse_bytes("12GB", "--x") == 12 * 10**9
    assert parse_bytes("1.5m", "--x") == 3 * 2**19
    assert parse_bytes("4096", "--x") == 4096
    assert (gib(2**30), gib(2**20)) == ("1.00 GiB", "1.0 MiB")


def test_auto_completes_what_was_not_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_30B_A3B))
    out = io.StringIO()
    given = {"model": str(tmp_path), "max_prefill_length": 1024}
    options = apply_auto(given, Console(file=out, width=200), machine("RTX 4090"))
    assert options["moe_expert_quantization"] == "int4" and options["max_prefill_length"] == 1024
    assert "--auto: int4" in out.getvalue() and "--max-prefill-length 1024" in out.getvalue()
    EngineConfig.from_kwargs(**options)
    kept = apply_auto(
        {"model": str(tmp_path), "moe_expert_quantization": "mxfp4"}, Console(file=out), machine("RTX 4090")
    )
    assert kept["moe_expert_quantization"] == "mxfp4"
    with pytest.raises(ValueError, match=r"--auto found nothing that fits.*lacks .* GiB"):
        apply_auto(given, Console(file=out), machine("RTX 4060", 8))


def test_auto_on_a_small_card_offloads_and_given_flags_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_30B_A3B))
    out = Console(file=io.StringIO(), width=200)
    options = apply_auto({"model": str(tmp_path)}, out, machine("RTX 5070"))
    config = EngineConfig.from_kwargs(**options)
    assert config.offload.moe_expert_offload and config.kernel.moe_expert_quantization == "int4"
    for given in (
        {"moe_expert_cache_size": "12"},
        {"moe_expert_quantization": "fp8", "moe_offload_mode": "staged"},
        {"page_size": 64, "max_running_requests": 3, "max_prefill_length": 700},
        {"tensor_parallel_size": 2, "memory_ratio": 0.8},
        {"gpu_memory_limit": "11GiB"},
    ):
        chosen = apply_auto({"model": str(tmp_path), **given}, out, machine("RTX 5070"))
        assert {name: chosen[name] for name in given} == given
        EngineConfig.from_kwargs(**chosen)


def test_a_misfit_is_explained_by_what_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_30B_A3B))
    error = DoesNotFit("weights need 57 GiB", 57 * GIB, 21 * GIB)
    text = explain_misfit(error, {"model": str(tmp_path), "page_size": 32}, machine("RTX 4090"))
    first, _, *commands = text.splitlines()
    assert first == str(error) and 1 <= len(commands) <= 3
    for line in commands:
        config = EngineConfig.from_kwargs(**engine_options(line.split("#")[0].strip()))
        assert config.cache.page_size == 32
    assert "int4, all on GPU" in text, "the nearest: one flag more"
    small = explain_misfit(error, {"model": str(tmp_path)}, machine("RTX 5070"), command="LLM")
    calls = small.splitlines()[2:]
    assert len(calls) == 3 and all("moe_expert_offload=True" in call for call in calls)
    for call in calls:
        tree = ast.parse(call.split("#")[0].strip(), mode="eval").body
        assert isinstance(tree, ast.Call)
        EngineConfig.from_kwargs(**{str(k.arg): ast.literal_eval(k.value) for k in tree.keywords})
    hopeless = explain_misfit(error, {"model": str(tmp_path)}, machine("RTX 4060", 8))
    assert "lacks" in hopeless
    odd = explain_misfit(error, {"model": str(tmp_path), "tensor_parallel_size": 5}, machine("RTX 5070"))
    assert odd.splitlines()[0] == str(error) and "can't be divided" in odd


def test_every_known_gpu_gives_a_plan() -> None:
    for gpu in GPUS:
        plan = plan_on(machine(gpu.name), configs.MIXTRAL_8X7B)
        print_plan(plan, Console(file=io.StringIO(), width=120))
        json.dumps(plan_dict(plan))
        assert {c.setup.weight_format for c in plan.candidates} == set(OFFERED)


def test_env_report(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_env_arguments(parser)
    assert run_env(parser.parse_args(["--json", "--no-probe"])) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"minisgl", "python", "torch", "GPU", "host memory", "limits"} <= report.keys()
    assert "CPU speed" not in report and "pinnable" in report["host memory"] and "memlock" in report["limits"]
    assert run_env(parser.parse_args([])) == 0
    assert "GB/s" in capsys.readouterr().out


def test_env_says_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, expected in (("echo 570.1, 5, 16", "570.1, PCIe 5 x16"), ("exit 3", "CalledProcessError")):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert expected in driver_report()
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_report() == "unknown: no nvidia-smi"
