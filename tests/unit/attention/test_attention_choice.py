"""Prompts by one backend and decode by another; and which one auto takes, by a record."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from minisgl.attention import AttentionProblem
from minisgl.attention.choice import fastest, write_record
from minisgl.attention.mixed import MixedAttention
from minisgl.attention.reference import max_error, random_case
from minisgl.attention.torch_sdpa import TorchAttention
from minisgl.config import EngineConfig
from minisgl.resolve import Facts, resolve

GPU = "a card"


class Captured(TorchAttention):
    """Stands for a backend whose decode steps may be captured."""

    name = "captured"
    graph_safe = True

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, problem, batch):
        self.plans += 1
        return super().plan(problem, batch)


def test_decode_and_prompts_go_their_ways() -> None:
    problem = AttentionProblem(4, 2, 16, page_size=4, dtype=torch.float32, scale=0.25)
    prompts, decode = TorchAttention(), Captured()
    mixed = MixedAttention(prompts, decode)
    assert (mixed.name, mixed.graph_safe) == ("sdpa", True)
    assert mixed.supports(problem, torch.device("cpu")) is None
    for lens, plans in (([(5, 9), (1, 3)], 0), ([(1, 9), (1, 3)], 1)):
        case = random_case(problem, lens)
        plan = mixed.plan(problem, case.batch)
        out = mixed.forward(case.q_THC, case.cache, case.batch, plan, problem)
        assert max_error(out, case) < 1e-5
        assert decode.plans == plans


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "tuned" / "prompts.json"
    write_record(GPU, {"triton_us": 100.0, "flashinfer_us": 80.0, "case": "prompts of 8192"}, path)
    return path


def install(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)


def test_the_record_decides(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, True)
    assert fastest(GPU, 128, False, record)[0] == "flashinfer"
    assert fastest("another", 128, False, record)[0] == "triton"
    for head_dim, has_sinks in ((80, False), (64, True)):
        name, reason = fastest(GPU, head_dim, has_sinks, record)
        assert name == "triton" and "no kernels" in reason
    install(monkeypatch, False)
    name, reason = fastest(GPU, 128, False, record)
    assert name == "triton" and "minisgl[flashinfer]" in reason
    write_record(GPU, {"triton_us": 100.0, "flashinfer_us": 99.0, "case": "prompts"}, record)
    install(monkeypatch, True)
    name, reason = fastest(GPU, 128, False, record)
    assert name == "triton" and "99 by flashinfer" in reason


def test_auto_follows_the_facts_and_sixteen_bits() -> None:
    facts = Facts(True, True, "bfloat16", 4096, attention=("flashinfer", "it was measured"))
    config, decisions = resolve(EngineConfig.from_kwargs(model="m"), facts)
    assert config.kernel.attention_backend == "flashinfer"
    assert any(d.flag == "--attention-backend" and d.reason == "it was measured" for d in decisions)
    wide, _ = resolve(EngineConfig.from_kwargs(model="m", dtype="float32"), facts)
    assert wide.kernel.attention_backend == "triton"
    on_cpu, _ = resolve(EngineConfig.from_kwargs(model="m", device="cpu"), facts)
    assert on_cpu.kernel.attention_backend == "sdpa"
