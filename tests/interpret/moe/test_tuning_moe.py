"""Choosing, measuring and remembering tiles, and the workspace: everything about the fused backend that needs no kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from minisgl.moe import autotune
from minisgl.moe.autotune import Tuner, TuningCase
from minisgl.moe.base import ExpertShape, Placement, Problem
from minisgl.moe.candidates import candidates, grouped_shared_bytes, has_tma, neighbours
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.records import Records, problem_key
from minisgl.moe.select import Choice, DeviceLimits, Tiles, grouped_block_m, grouped_heuristic, select
from minisgl.moe.workspace import Workspace, buffer_specs, largest_block_m, max_blocks
from tests.interpret.moe.steps import run_step, store
from tests.moe_oracle import random_case

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232_448, 132)
CONSUMER = DeviceLimits("a consumer card", (12, 0), 101_376, 48)
FORMATS = {"bf16": 0, "fp8": 0, "int8": 0, "int4": 128, "fp8_block": 128, "mxfp4": 32}
ROOT = Path(__file__).parents[3]


def problem(num_tokens: int, format_name: str = "bf16", experts: int = 128, dims=(2048, 768)) -> Problem:
    shape = ExpertShape(*dims)
    return Problem(num_tokens, 8, experts, shape, format_name, torch.bfloat16, "silu", FORMATS[format_name])


GROUPED = Choice("grouped", 16, Tiles(64, 64, 4), Tiles(64, 64, 4))
DIRECT = Choice("direct", 1, Tiles(8, 256, 4), Tiles(4, 256, 4))


def test_blocks_follow_the_rows_a_slot_gets_not_the_tokens():
    assert grouped_block_m(problem(64)) == 16
    assert grouped_block_m(problem(64, experts=8)) == 64
    assert grouped_block_m(problem(4096)) == 128
    assert [largest_block_m(tokens) for tokens in (1, 16, 17, 64, 4096)] == [16, 16, 32, 64, 128]


def test_the_threshold_forces_and_forbids_the_direct_kernels():
    record = {1: GROUPED, 64: DIRECT}
    assert select(problem(1), H200, record, 4).kernel == "direct"
    assert select(problem(5), H200, record, 4).kernel == "grouped"
    assert select(problem(1), H200, record, 0) == GROUPED
    assert select(problem(1), H200, record, "auto") == GROUPED


def test_a_record_serves_its_own_bucket_and_the_nearest_where_none_was_measured():
    record = {1: DIRECT, 16: GROUPED, 64: replace(GROUPED, block_m=32)}
    assert select(problem(1), H200, record) == DIRECT
    assert select(problem(9), H200, record) == GROUPED
    assert select(problem(40), H200, record).block_m == 32
    assert select(problem(4096), H200, record).block_m == 32
    tall = {
        4096: replace(GROUPED, block_m=128)
    }  # taller than any slot of a small batch can fill: not allowed there
    assert select(problem(16), H200, tall).block_m <= 16


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("limits", [H200, CONSUMER], ids=["H200", "99 KB"])
def test_nothing_offered_exceeds_the_shared_memory(format_name, limits):
    for tokens in (1, 64, 4096):
        wanted = problem(tokens, format_name)
        choice = grouped_heuristic(wanted, limits)
        for tiles, halves in ((choice.gate_up, 2), (choice.down, 1)):
            assert grouped_shared_bytes(wanted, tiles, choice.block_m, halves) <= limits.shared_bytes
        for kernel, block_m, ups, downs in candidates(wanted, limits):
            assert ups
            assert downs
            if kernel == "grouped":
                around = [
                    n for t in ups[:2] for n in neighbours(wanted, limits, kernel, block_m, "gate_up", t)
                ]
                for tiles in (*ups, *around):
                    assert grouped_shared_bytes(wanted, tiles, block_m, 2) <= limits.shared_bytes


def test_candidates_include_wide_steps_and_descriptors_only_where_rows_are_aligned():
    everything = [t for _, _, ups, _ in candidates(problem(4096), H200, 10_000) for t in ups]
    assert {64, 128} <= {tiles.block_k for tiles in everything}
    assert has_tma(problem(1), H200)
    assert not has_tma(problem(1), CONSUMER) or CONSUMER.capability >= (9, 0)
    assert not has_tma(problem(1, dims=(2044, 764)), H200)
    assert not has_tma(problem(1), replace(H200, capability=(8, 9)))


def test_records_survive_on_disk_and_belong_to_one_gpu(tmp_path):
    records = Records(tmp_path)
    card = replace(CONSUMER, name="some card")
    records.add(problem(50), card, GROUPED, 12.5)
    again = Records(tmp_path)
    assert again.lookup(problem(60), card) == {64: GROUPED}
    assert again.lookup(problem(60, "fp8"), card) is None
    assert again.lookup(problem(60), H200) != {64: GROUPED}
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    assert content["triton"] == triton.__version__
    assert content["problems"][problem_key(problem(50))]["64"]["us"] == 12.5


def test_a_record_of_the_running_triton_wins_over_another_version_s(tmp_path):
    card = replace(CONSUMER, name="some card")
    records = Records(tmp_path)
    records.add(problem(1), card, GROUPED, 1.0)
    (file,) = tmp_path.iterdir()
    other = json.loads(file.read_text().replace(triton.__version__, "0.0"))
    other["problems"][problem_key(problem(1))]["1"]["choice"]["block_m"] = 32
    (tmp_path / "some_card.triton-0.0.json").write_text(json.dumps(other))
    assert Records(tmp_path).lookup(problem(1), card)[1].block_m == 16
    file.unlink()
    assert Records(tmp_path).lookup(problem(1), card)[1].block_m == 32


def test_a_folder_of_one_s_own_holds_no_copy_of_what_is_shipped(tmp_path):
    records = Records(tmp_path)
    records.add(problem(50), H200, GROUPED, 12.5)
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_text())["problems"]) == [problem_key(problem(50))]
    records = Records(tmp_path)
    records.add(problem(1), H200, GROUPED, 1.0)
    kept = json.loads(file.read_text())["problems"]
    assert set(kept[problem_key(problem(50))]) == {"1", "64"}
    assert records.lookup(problem(1, "fp8"), H200) == Records().lookup(problem(1, "fp8"), H200)


def test_shipped_records_name_choices_that_exist():
    shipped = Records()
    for format_name in ("bf16", "fp8", "int8", "int4"):
        record = shipped.lookup(problem(1, format_name), H200)
        assert record
        assert all(choice.block_m <= largest_block_m(bucket) for bucket, choice in record.items())


@pytest.mark.parametrize(("direct", "expected"), [(94.0, "direct"), (96.0, "grouped")])
def test_direct_has_to_win_by_five_percent(direct, expected, monkeypatch):
    class Search:
        def __init__(self, tuner, case):
            pass

        def best_tiles(self, kernel, block_m, ups, downs):
            return Choice(kernel, block_m, ups[0], downs[0])

        def whole_step(self, choice):
            return direct if choice.kernel == "direct" else 100.0

    monkeypatch.setattr(autotune, "_Search", Search)
    x, ids = torch.zeros(1, 2048), torch.zeros(1, 8, dtype=torch.int32)
    tuner = Tuner(H200, Records())
    case = TuningCase(problem(1), x, Placement(None, ids), x)
    assert tuner.tune(case).kernel == expected
    assert tuner.records.lookup(problem(1), H200)[1].kernel == expected
    assert not tuner.wants(problem(1), ids)


def test_the_workspace_grows_by_powers_of_two_and_keeps_what_it_replaced():
    case, stored = random_case(1, 2, 4, 64, 48), store(random_case(1, 2, 4, 64, 48), "none")
    counts = {True: 0, False: 0}
    for cached in counts:
        backend = FusedMoeBackend(workspace_cache=cached, small_m_threshold=0)
        for num_tokens in (1, 2, 4, 8, 16, 32):
            case = random_case(num_tokens, 2, 4, 64, 48)
            run_step(backend, case, stored)
            run_step(backend, case, stored)
        counts[cached] = backend.workspace(case.x.device).num_allocations
    assert counts[True] <= 6
    assert counts[False] >= 6 * 2 * 5


def test_a_view_of_a_replaced_arena_stays_valid():
    workspace = Workspace(torch.device("cpu"))
    old = workspace.claim(problem(2)).activated_PF
    old.fill_(1.0)
    workspace.claim(problem(300))
    workspace.poison(0xFF)
    assert bool((old == 1.0).all())


@pytest.mark.parametrize("tokens", [1, 16, 100, 4096])
@pytest.mark.parametrize("experts", [1, 8, 128, 512])
def test_buffers_hold_every_block_size_that_may_be_used(tokens, experts):
    wanted = problem(tokens, experts=experts)
    specs = buffer_specs(wanted, 1 << (tokens - 1).bit_length())
    block_m = 16
    while block_m <= largest_block_m(tokens):
        assert max_blocks(tokens * 8, experts, block_m) * block_m <= specs["sorted_R"][0][0]
        assert max_blocks(tokens * 8, experts, block_m) <= specs["block_slots"][0][0]
        block_m *= 2


def test_too_large_a_block_is_an_assertion_not_a_write_past_the_end():
    buffers = Workspace(torch.device("cpu")).claim(problem(16))
    buffers.check_room(128, 128, 16)
    with pytest.raises(AssertionError, match="too small"):
        buffers.check_room(128, 128, 128)


@pytest.mark.slow
def test_kernels_compile_for_a_consumer_card_within_its_shared_memory():
    """Compiled in another process, without the interpreter; no GPU is needed."""
    command = [
        sys.executable,
        "benchmark/moe_compile.py",
        "--capability",
        "120",
        "--formats",
        "int4",
        "--tokens",
        "1,64",
    ]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "python", "HOME": str(Path.home())}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "gate_up_kernel" in result.stdout


@pytest.mark.parametrize("format_name", ["int4", "mxfp4"])
@pytest.mark.parametrize("hidden_dim", [96, 32])
def test_steps_of_packed_weights_have_columns_enough_for_a_product(format_name, hidden_dim):
    """The four numbers of a word are multiplied apart: BLOCK_K / 4 columns, of which a product needs 16."""
    narrow = replace(problem(4, format_name), shape=ExpertShape(192, hidden_dim))
    for limits in (H200, CONSUMER):
        choice = grouped_heuristic(narrow, limits)
        found = [choice.gate_up, choice.down]
        for _, _, ups, downs in candidates(narrow, limits):
            found += [*ups, *downs]
        assert min(tiles.block_k for tiles in found) >= 64
