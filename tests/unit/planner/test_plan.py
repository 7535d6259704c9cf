"""Plans: what is recommended, that its command line is one the engine takes, and what is said about the rest."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.engine.memory import GIB, DoesNotFit, Setup
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
from minisgl.planner.features import FEATURES, Feature
from minisgl.planner.gpus import GPUS
from minisgl.planner.machine import Machine, named_machine, this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import PRECISION, Plan, Request, make_plan
from minisgl.planner.predict import (
    LINK_KERNEL_SHARE,
    LOCAL_HITS,
    SHARES,
    decode_ms,
    launch_us,
    local_hit_rate,
    prefill_seconds,
    random_hit_rate,
)
from minisgl.planner.report import plan_dict, print_plan
from minisgl.planner.units import gib
from tests.unit.planner import configs

QWEN = read_numbers(configs.QWEN3_30B_A3B)
RECORDS = Path(__file__).parents[3] / "benchmark" / "results" / "limits.jsonl"


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
    plan = plan_on(machine(gpu))
    assert plan.recommended is not None and plan.candidates[0] is plan.recommended
    assert plan.recommended.setup.weight_format == expected
    assert plan.recommended.usable and plan.recommended.setup.num_slots is None
    config = EngineConfig.from_kwargs(**engine_options(plan.command(plan.recommended)))
    assert config.kernel.moe_expert_quantization == (expected if expected != "none" else "auto")
    assert plan.recommended.kv_tokens >= 32_768
    budget = plan.machine.gpu_bytes * 0.9 - plan.machine.gpu_used
    assert plan.recommended.ledger.on("device") + plan.recommended.left == pytest.approx(budget, abs=1)


def test_a_card_too_small_gets_reasons_and_the_rows_that_a_cache_would_allow() -> None:
    plan = plan_on(machine("RTX 5070"))
    assert plan.recommended is None
    cached = [c for c in plan.candidates if c.setup.num_slots is not None and c.fits]
    assert cached and all(c.lacks == (FEATURES["expert-offload"].reason,) for c in cached)
    assert all("--moe-expert-offload --moe-expert-cache-size" in plan.command(c) for c in cached)
    assert all(c.local.decode_ms <= c.worst.decode_ms for c in cached)
    resident = [c for c in plan.candidates if c.setup.num_slots is None]
    assert all("lacks" in c.verdict and "device memory" in c.verdict for c in resident)


def test_one_line_makes_a_feature_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(feature_table.FEATURES, "expert-offload", Feature(True, ""))
    plan = plan_on(machine("RTX 5070"))
    assert plan.recommended is not None and plan.recommended.setup.num_slots is not None
    assert plan.recommended.verdict == "recommended"


def test_steps_shrink_before_precision_does() -> None:
    small = plan_on(machine("RTX 4090", gpu_bytes=int(23.5 * GIB))).candidates[0]
    assert small.options["max_prefill_length"] < 8192 and small.options["max_running_requests"] < 256
    kept = plan_on(machine("RTX 4090"), given={"max_prefill_length": 8192}).candidates[0]
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
    two = plan_on(machine("L40S"), num_ranks=2)
    assert two.recommended is None
    assert all(FEATURES["tensor-parallel"].reason in c.lacks for c in two.candidates)
    assert "--tp 2" in two.command(two.candidates[0])
    whole = plan_on(machine("L40S")).candidates
    none_of = [next(c for c in cs if c.label == "bfloat16, all on GPU") for cs in (two.candidates, whole)]
    assert none_of[0].fits and not none_of[1].fits
    published = {**configs.QWEN3_30B_A3B, "quantization_config": {"quant_method": "fp8"}}
    fp8 = plan_on(machine("H200"), published)
    assert {c.setup.weight_format for c in fp8.candidates} == {"fp8_block"}
    assert fp8.recommended is not None and fp8.recommended.lacks == ()


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


def test_the_link_bound_is_bytes_by_miss_rate_by_bandwidth() -> None:
    """Figures of an fp8 and a 4-bit cache at about 51 GB/s: 33.3 ms with 8 slots and random routing, 2.0 ms at 89.4 % hits."""
    where = machine("H200", link_gbps=51 / LINK_KERNEL_SHARE)
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=40_960)
    for weight_format, slots, hits, expected in (("fp8", 8, 0.0625, 33.3), ("int4", 49, 0.894, 2.0)):
        slow = replace(setup, weight_format=weight_format, num_slots=slots)
        fast = replace(where, read_gbps=1e9)
        link = decode_ms(QWEN.sizes, slow, fast, 0, hits) - 48 * launch_us(weight_format)[1] / 1e3
        assert link == pytest.approx(expected, rel=0.05)


def test_resident_decode_reads_weights_once() -> None:
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=40_960)
    where = machine("H200")
    launches = 48 * sum(launch_us("none")) / 1e3
    read = (QWEN.sizes.active_params - QWEN.sizes.params["embedding"]) * 2
    assert decode_ms(QWEN.sizes, setup, where, 0, 1.0) == pytest.approx(
        launches + read / where.read_gbps / 1e6
    )
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


def test_constants_have_records() -> None:
    records = {row["name"]: row for row in map(json.loads, RECORDS.read_text().splitlines())}
    source = Path(__file__).parents[3] / "python" / "minisgl" / "planner" / "predict.py"
    named = [
        line.split("source: ")[1].split(",")[0].strip(' "')
        for line in source.read_text().splitlines()
        if "source: " in line
    ]
    assert named and set(named) <= records.keys()
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
    assert run(tmp_path, "--gpu", "RTX 5070") == 1
    assert "Nothing that this version runs fits" in capsys.readouterr().out


def test_json_has_every_candidate_and_no_infinities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(tmp_path, "--gpu", "RTX 3090", "--link-gbps", "12.5", "--json", config=configs.OLMOE_1B_7B) == 1
    )
    out = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert out["machine"]["link_gbps"] == 12.5 and out["model"]["not_served"]
    assert {c["label"].split(",")[0] for c in out["candidates"]} == {"bfloat16", *PRECISION[1:]}
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
        apply_auto(given, Console(file=out), machine("RTX 5070"))


def test_a_misfit_is_explained_by_what_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_30B_A3B))
    error = DoesNotFit("weights need 57 GiB", 57 * GIB, 21 * GIB)
    text = explain_misfit(error, {"model": str(tmp_path), "page_size": 32}, machine("RTX 4090"))
    first, _, *commands = text.splitlines()
    assert first == str(error) and 1 <= len(commands) <= 3
    for line in commands:
        config = EngineConfig.from_kwargs(**engine_options(line.split("#")[0].strip()))
        assert config.cache.page_size == 32 and config.kernel.moe_expert_quantization in ("int4", "mxfp4")
    hopeless = explain_misfit(error, {"model": str(tmp_path)}, machine("RTX 4060"))
    assert "lacks" in hopeless


def test_every_known_gpu_gives_a_plan() -> None:
    for gpu in GPUS:
        plan = plan_on(machine(gpu.name), configs.MIXTRAL_8X7B)
        print_plan(plan, Console(file=io.StringIO(), width=120))
        json.dumps(plan_dict(plan))
        assert {c.setup.weight_format for c in plan.candidates} == set(PRECISION)


def test_env_report(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_env_arguments(parser)
    assert run_env(parser.parse_args(["--json", "--no-probe"])) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"minisgl", "python", "torch", "GPU", "host memory", "limits"} <= report.keys()
    assert "CPU speed" not in report
    assert run_env(parser.parse_args([])) == 0
    assert "GB/s" in capsys.readouterr().out
