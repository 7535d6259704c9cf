"""What a plan reads: the machine, the model's files, and nothing from the network where it must not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.cli import main
from minisgl.engine.memory import CONTEXT_BYTES, GIB
from minisgl.models.sizes import PARTS
from minisgl.moe.store.pinned import HostFacts
from minisgl.planner import auto, command
from minisgl.planner import machine as machine_module
from minisgl.planner.breakdown import part_of, stored_bytes
from minisgl.planner.command import add_plan_arguments, machine_of
from minisgl.planner.machine import limited, named_machine, pinnable
from minisgl.planner.numbers import read_numbers
from minisgl.planner.predict import SHARES
from tests.e2e.model_factory import make_model
from tests.unit.planner import configs


def test_pinnable_is_what_the_engine_would_pin() -> None:
    assert pinnable(HostFacts(total=64 * GIB, available=40 * GIB)) == 38 * GIB
    assert pinnable(HostFacts(total=64 * GIB, available=40 * GIB, wsl=True)) == 32 * GIB
    assert pinnable(HostFacts(total=64 * GIB, available=20 * GIB, wsl=True)) == 18 * GIB
    assert pinnable(HostFacts(total=2 * GIB, available=GIB)) == 0


def test_a_limited_card() -> None:
    here = named_machine("H200", None, 64 * GIB, SHARES)
    small = limited(here, 12 * GIB)
    assert (small.gpu_bytes, small.gpu_used) == (12 * GIB, CONTEXT_BYTES)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return parser.parse_args(["--model", "x", *words])


def test_flags_describe_a_machine() -> None:
    named = machine_of(parse("--gpu", "rtx5070", "--host-memory", "32GiB", "--link-gbps", "12"), {})
    assert (named.gpu, named.gpu_bytes, named.link_gbps) == ("RTX 5070", 12 * GIB, 12.0)
    assert (named.host_bytes, named.pinnable_bytes) == (32 * GIB, 30 * GIB)
    assert named.read_gbps == pytest.approx(672 * 4.43 / 4.8)
    unnamed = machine_of(parse("--gpu-memory", "10GB"), {})
    assert unnamed.gpu_bytes == 10 * 10**9 and "no --gpu was named" in unnamed.notes[0]
    capped = machine_of(parse("--gpu", "H200"), {"gpu_memory_limit": "12GiB"})
    assert capped.gpu_bytes == 12 * GIB


def test_the_probe_takes_a_fifth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(machine_module.time, "perf_counter", lambda: next(clock) * 0.01)
    calls = []
    seconds = machine_module._seconds(lambda: calls.append(1))
    assert seconds == pytest.approx(0.01, rel=0.2) and 15 <= len(calls) <= 25
    assert machine_module.PROBE_SECONDS == 0.2


def test_offline_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_30B_A3B))
    asked: list[dict[str, Any]] = []

    def fake(model: str, source: str, revision: str | None, **options: Any) -> Path:
        asked.append({"model": model, "source": source, "revision": revision, **options})
        return tmp_path

    monkeypatch.setattr(command, "resolve_model", fake)
    words = ["--offline", "--revision", "v1", "--gpu", "H200", "--json"]
    assert main(["plan", "--model", "owner/name", *words]) == 0
    auto.plan_for({"model": "owner/name", "offline": True}, 1024, named_machine("H200", None, GIB, SHARES))
    assert [(a["offline"], a["weights"]) for a in asked] == [(True, False)] * 2
    assert asked[0]["revision"] == "v1"


def test_a_hub_model_is_not_asked_for_offline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "owner/never-fetched", "--offline", "--gpu", "H200"]) == 2
    assert "not in the cache" in capsys.readouterr().err


def test_exact_bytes_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path, "qwen3_moe")
    stored = stored_bytes(tmp_path)
    assert stored is not None
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = read_numbers(config, tmp_path).sizes
    item = sum(stored.values()) // sizes.total_params
    assert stored == {
        **{name: sizes.params[name] * item for name in PARTS if sizes.params[name]},
        "experts": sizes.expert_params * item,
    }, "every expert, not the active ones"
    assert main(["plan", "--model", str(tmp_path), "--gpu", "H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint_bytes"] == stored
    assert main(["plan", "--model", str(tmp_path), "--gpu", "H200"]) == 0
    assert "checkpoint" in capsys.readouterr().out


def test_without_weights_an_index_says_the_total(tmp_path: Path) -> None:
    assert stored_bytes(tmp_path) is None
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 57}, "weight_map": {}}')
    assert stored_bytes(tmp_path) == {"all": 57}
    index.write_text("{}")
    assert stored_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.0.self_attn.q_norm.weight", "attention"),
        ("model.layers.0.self_attn.qkv_proj.qweight", "attention"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.0.mlp.router.bias", "router"),
        ("model.layers.0.mlp.experts.5.gate_proj.weight", "experts"),
        ("model.layers.0.block_sparse_moe.experts.5.w1.weight", "experts"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", "scales"),
        ("model.layers.0.mlp.experts.5.up_proj.weight_scale_inv", "scales"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.0.mlp.gate_proj.weight", "dense MLPs"),
        ("vision_tower.patch.weight", "other"),
    ],
)
def test_parts_by_name(name: str, part: str) -> None:
    assert part_of(name) == part
