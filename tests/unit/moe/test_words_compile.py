"""The decode kernels on words compile for GPUs that aren't here, without spills, and four words of a row are one thread's.

The arithmetic of `kernels.words` counts on that layout where FOURS is set, and Triton decides it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from minisgl.moe.base import ExpertShape, Problem  # noqa: E402
from minisgl.moe.candidates import direct_tiles  # noqa: E402
from minisgl.moe.kernels import launch  # noqa: E402
from minisgl.moe.kernels.precompile import CompileTask, compile_choice  # noqa: E402
from minisgl.moe.select import Choice, DeviceLimits, Tiles, direct_heuristic  # noqa: E402
from tests.unit.moe.test_place_compile import NamedTarget, spilled_bytes  # noqa: E402

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232_448, 132)
GROUPS = {"int4": 128, "mxfp4": 32, "fp8_block": 128}


def problem(format_name: str, model_dim: int = 2048, hidden_dim: int = 768) -> Problem:
    group = GROUPS.get(format_name, 0)
    return Problem(1, 8, 16, ExpertShape(model_dim, hidden_dim), format_name, torch.bfloat16, "silu", group)


@pytest.fixture(params=[90, 120], ids=lambda capability: f"sm_{capability}")
def compiled(request: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    kernels: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels[function.__name__] = run(function, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(triton.runtime.driver, "_active", NamedTarget(request.param))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch, "on_cuda", lambda device: True)
    monkeypatch.setattr(launch, "has_dependent_launch", lambda device: request.param >= 90)
    return kernels


def layouts_of_fours(ttgir: str) -> list[str]:
    """Layouts of the tiles that assembly takes four elements at a time."""
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    lines = [line for line in ttgir.splitlines() if "packed_element = 4" in line]
    return [named[name] for line in lines for name in re.findall(r"tensor<[^#]*, (#\w+)>", line)]


@pytest.mark.parametrize("format_name", ["bf16", "int8", "fp8", "int4", "mxfp4", "fp8_block"])
def test_four_words_of_a_row_are_one_threads(format_name, compiled, tmp_path):
    task = problem(format_name)
    choice = direct_heuristic(task, H200)
    compile_choice(CompileTask(task, choice, symmetric=False))
    assert set(compiled) == {"words_gate_up_kernel", "words_down_kernel"}
    for kernel in compiled.values():
        assert spilled_bytes(kernel, tmp_path) == 0
        layouts = layouts_of_fours(kernel.asm["ttgir"])
        assert bool(layouts) == (format_name != "bf16")
        for layout in layouts:
            assert "sizePerThread = [1, 1, 4]" in layout and "order = [2," in layout
            lanes = re.search(r"threadsPerWarp = \[\d+, \d+, (\d+)\]", layout)
            assert lanes is not None and int(lanes[1]) >= 4  # a quad lies in one row


@pytest.mark.parametrize("format_name", ["bf16", "int8", "fp8", "mxfp4"])
def test_tails_do_not_spill(format_name, compiled, tmp_path):
    task = problem(format_name, 2880, 1408)
    compile_choice(CompileTask(task, direct_heuristic(task, H200)))
    assert [spilled_bytes(kernel, tmp_path) for kernel in compiled.values()] == [0, 0]


def test_a_limit_of_registers_costs_hardly_a_spill(compiled, tmp_path):
    """Tiles of eight units, as decoding of four tokens uses them: eight programs of two warps fit a multiprocessor."""
    tiles = Tiles(8, 2048, 2, registers=128)
    compile_choice(CompileTask(problem("int4"), Choice("direct", 1, tiles, Tiles(8, 256, 2))))
    kernel = compiled["words_gate_up_kernel"]
    assert spilled_bytes(kernel, tmp_path) <= 32
    assert ".maxnreg 128" in kernel.asm["ptx"]


def test_int4_is_multiplied_by_tensor_cores_where_a_group_is_a_quads(compiled):
    for group, products in ((128, True), (64, False)):
        task = problem("int4")
        task = Problem(**{**vars(task), "group_size": group})
        compile_choice(CompileTask(task, direct_heuristic(task, H200)))
        for kernel in compiled.values():
            assert ("mma.sync" in kernel.asm["ptx"]) == products


@pytest.mark.parametrize(
    ("capability", "format_name"),
    [(80, "int4"), (80, "mxfp4"), (80, "int8"), (89, "fp8"), (89, "fp8_block")],
)
def test_arithmetic_of_older_devices(capability, format_name, compiled, monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", NamedTarget(capability))
    monkeypatch.setattr(launch, "has_dependent_launch", lambda device: False)
    limits = DeviceLimits("older", divmod(capability, 10), 101_376, 100)
    task = problem(format_name)
    compile_choice(CompileTask(task, direct_heuristic(task, limits)))
    assert all("mma.sync" in kernel.asm["ptx"] for kernel in compiled.values())


@pytest.mark.parametrize("format_name", ["int8", "fp8", "fp8_block"])
def test_bytes_are_multiplied_by_tensor_cores_where_a_thread_has_four_words(format_name, compiled):
    task = problem(format_name)
    singles = Tiles(4, 128, 4)
    for choice in (direct_heuristic(task, H200), Choice("direct", 1, singles, Tiles(4, 128, 8))):
        compile_choice(CompileTask(task, choice))
        for kernel in compiled.values():
            assert ("mma.sync" in kernel.asm["ptx"]) == (choice.gate_up != singles)


@pytest.mark.parametrize("format_name", ["bf16", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("gemm", ["gate_up", "down"])
def test_candidates_leave_four_words_for_every_thread(format_name, gemm):
    task, experts = problem(format_name), {"gate_up": 1, "down": 8}[gemm]
    found = [tiles for tiles in direct_tiles(task, H200, gemm) if not tiles.wide]
    assert len(found) > 10
    per_word = {"bf16": 2, "int8": 4, "int4": 8, "mxfp4": 8}[format_name]
    assert all(experts * tiles.block_k // per_word >= 128 * tiles.num_warps for tiles in found)


def test_a_step_may_pass_the_end_of_a_row_by_an_eighth():
    def widths(model_dim: int, hidden_dim: int) -> tuple[int, int]:
        choice = direct_heuristic(problem("int8", model_dim, hidden_dim), H200)
        return choice.gate_up.block_k, choice.down.block_k

    assert widths(2048, 768) == (2048, 256)
    assert widths(2880, 1408) == (1024, 256)
    assert widths(1280, 160) == (256, 128)


def test_float16_activations_take_other_kernels(compiled):
    task = Problem(**{**vars(problem("int4")), "dtype": torch.float16})
    tiles = direct_heuristic(task, H200)
    assert tiles.gate_up.wide and tiles.down.wide
    with pytest.raises(AssertionError, match="words"):
        compile_choice(CompileTask(task, Choice("direct", 1, Tiles(4, 128, 4), Tiles(4, 128, 4))))
