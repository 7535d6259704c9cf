"""Where the kernel for both GEMMs is offered, what is chosen where it can't be had, and that it compiles without spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from minisgl.moe.autotune import Tuner
from minisgl.moe.base import ExpertShape, Problem
from minisgl.moe.candidates import persistent_choices
from minisgl.moe.kernels.precompile import CompileTask, compile_choice
from minisgl.moe.records import Records
from minisgl.moe.select import (
    HOPPER_SHARED_BYTES,
    PERSISTENT_ROW_BYTES,
    DeviceLimits,
    can_be_persistent,
    grouped_heuristic,
    has_gluon,
    persistent_heuristic,
    select,
)
from tests.unit.moe.test_place_compile import spilled_bytes
from tests.unit.moe.test_words_compile import compiled  # noqa: F401

H200 = DeviceLimits("NVIDIA H200", (9, 0), HOPPER_SHARED_BYTES, 132, gluon=True)
OTHERS = {
    "another Triton": replace(H200, gluon=False),
    "an older card": replace(H200, capability=(8, 0)),
    "99 KB of shared memory": replace(H200, shared_bytes=101_376),
    "a newer card": replace(H200, capability=(12, 0), shared_bytes=101_376),
}


def problem(format_name: str = "bf16", dims: tuple[int, int] = (2048, 768), **changes) -> Problem:
    group = {"int4": 128, "mxfp4": 32, "fp8_block": 128}.get(format_name, 0)
    plain = Problem(64, 8, 128, ExpertShape(*dims), format_name, torch.bfloat16, "silu", group)
    return replace(plain, **changes)


REFUSED = {
    "int4": problem("int4"),
    "mxfp4": problem("mxfp4"),
    "block scales": problem("fp8_block"),
    "float32": problem("fp32", dtype=torch.float32),
    "int8 with float16": problem("int8", dtype=torch.float16),
    "biases": problem(shape=ExpertShape(2048, 768, bias=True)),
    "another activation": problem(activation="gelu"),
    "128 does not divide F": problem(dims=(2048, 704)),
    "256 does not divide D": problem(dims=(2880, 768)),
}


@pytest.mark.parametrize("format_name", ["bf16", "fp16", "fp8", "int8"])
def test_offered_on_hopper_up_to_a_block_a_slot(format_name):
    wanted = problem(format_name, dtype=torch.float16 if format_name == "fp16" else torch.bfloat16)
    for tokens, block_m in ((16, 16), (64, 16), (256, 32), (1024, 64 if format_name == "int8" else 128)):
        choice = select(replace(wanted, num_tokens=tokens), H200)
        assert (choice.kernel, choice.block_m) == ("persistent", block_m)
    assert select(replace(wanted, num_tokens=4096), H200).kernel == "grouped"
    assert select(replace(wanted, num_tokens=1), H200).kernel == "direct"
    for limits in OTHERS.values():
        assert select(wanted, limits).kernel == "grouped"
        assert not persistent_choices(wanted, limits)


@pytest.mark.parametrize("reason", REFUSED)
def test_not_offered_where_it_can_t_multiply(reason):
    wanted = REFUSED[reason]
    assert not can_be_persistent(wanted, H200)
    assert not persistent_choices(wanted, H200)
    assert select(wanted, H200).kernel != "persistent"


def test_a_record_gives_tiles_of_other_kernels_elsewhere(tmp_path):
    wanted = problem(num_tokens=64)
    card, choice = replace(H200, name="some card"), persistent_heuristic(wanted)
    Records(tmp_path).add(wanted, card, choice, 1.0)
    assert Records(tmp_path).lookup(wanted, card) == {64: choice}
    elsewhere = replace(card, gluon=False)
    assert Records(tmp_path).lookup(wanted, elsewhere) == {64: grouped_heuristic(wanted, elsewhere)}


@pytest.mark.parametrize("format_name", ["bf16", "fp8", "int8", "int4"])
def test_what_is_shipped_for_other_tritons_was_measured_too(format_name):
    """Not the heuristic's tiles, nor kernels that only one Triton has."""
    wanted, elsewhere = problem(format_name), replace(H200, gluon=False)
    shipped, others = Records().lookup(wanted, H200), Records().lookup(wanted, elsewhere)
    assert shipped is not None
    assert others is not None
    changed = [bucket for bucket in shipped if others[bucket] != shipped[bucket]]
    assert len(changed) >= 3
    for bucket in changed:
        choice = others[bucket]
        assert choice.kernel == "grouped"
        assert not (choice.gate_up.roles or choice.down.roles)
        assert choice != grouped_heuristic(replace(wanted, num_tokens=bucket), elsewhere)


@pytest.mark.parametrize("format_name", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("tokens", [16, 64, 1024])
def test_buffers_of_all_candidates_fit(tokens, format_name):
    found = persistent_choices(problem(format_name, num_tokens=tokens), H200)
    assert {choice.gate_up.block_n for choice in found} == {64, 128}
    for choice in found:
        rows = 2 * choice.gate_up.block_n + choice.block_m * (2 if format_name == "int8" else 1)
        assert choice.gate_up.num_stages >= 3
        assert choice.gate_up.num_stages * rows * PERSISTENT_ROW_BYTES <= HOPPER_SHARED_BYTES - 5 * 1024
        assert choice.down == replace(choice.gate_up, block_n=2 * choice.gate_up.block_n)


def test_the_tuner_compares_it_with_the_others(monkeypatch, tmp_path):
    """The faster one wins, whichever it is."""
    wanted, compiled_choices = problem(), []
    tuner = Tuner(
        H200, Records(tmp_path), compile_ahead=lambda problem, choices: compiled_choices.extend(choices)
    )
    grouped = grouped_heuristic(wanted, replace(H200, gluon=False))
    for persistent_us, expected in ((50.0, "persistent"), (500.0, "grouped")):
        us = {"persistent": persistent_us, "grouped": 100.0}
        monkeypatch.setattr(
            "minisgl.moe.autotune._Search.__init__", lambda self, tuner, case: _fill(self, tuner, case)
        )
        monkeypatch.setattr(
            "minisgl.moe.autotune._Search.whole_step", lambda self, choice, us=us: us[choice.kernel]
        )
        monkeypatch.setattr(
            "minisgl.moe.autotune._Search.best_tiles",
            lambda self, kernel, *rest: grouped if kernel == "grouped" else None,
        )
        assert tuner.tune(_Case(wanted)).kernel == expected
    assert set(persistent_choices(wanted, H200)) <= set(compiled_choices)


class _Case:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def _fill(search, tuner, case) -> None:
    search.tuner, search.case = tuner, case


@pytest.mark.skipif(not has_gluon(), reason="needs the Triton for whose Gluon the kernel is written")
@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("format_name", ["bf16", "fp8", "int8"])
def test_it_compiles_without_spills_and_keeps_results_in_the_l2(format_name, compiled, tmp_path):  # noqa: F811
    wanted = problem(format_name)
    compile_choice(CompileTask(wanted, persistent_heuristic(wanted)))
    assert set(compiled) == {"persistent_kernel"}
    assert spilled_bytes(compiled["persistent_kernel"], tmp_path) == 0
    ptx = compiled["persistent_kernel"].asm["ptx"]
    kept = re.findall(r"st\.global\.\S*L2::cache_hint", ptx)
    assert len(kept) >= 3  # one of activated rows, two of rows
    assert ptx.count("createpolicy.fractional.L2::evict_last") >= len(kept)
