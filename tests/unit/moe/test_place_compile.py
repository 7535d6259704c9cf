"""The kernels of the expert cache compile for GPUs that aren't here, without spills, and the fetch reads 16 bytes a load."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from minisgl.moe.kernels.fetch import await_chunks  # noqa: E402
from minisgl.moe.store.device_plan import DevicePlan  # noqa: E402
from minisgl.moe.store.passing import plan_passing  # noqa: E402


class NamedTarget:
    """The part of a driver that compiling asks for. The device number keeps its kernels apart from a real device's."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 1000 + self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=[90, 120], ids=lambda capability: f"sm_{capability}")
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What would have been launched, by name."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    compiled: dict[str, list[Any]] = {}
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        compiled.setdefault(function.__name__, []).append(kernel)

    monkeypatch.setattr(triton.runtime.driver, "_active", NamedTarget(request.param))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return compiled


def spilled_bytes(kernel: Any, folder: Path) -> int:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


@pytest.mark.slow
def test_place_compiles_for_large_layers(kernels, tmp_path: Path) -> None:
    plan, ids_TK = DevicePlan(512, 256, torch.device("cpu")), torch.zeros((64, 8), dtype=torch.int32)
    plan.place(ids_TK, first=True)
    plan.place(ids_TK, first=False)
    assert all(spilled_bytes(kernel, tmp_path) <= 8 for kernel in kernels["place_kernel"])
    assert max(kernel.metadata.shared for kernel in kernels["place_kernel"]) <= 48 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [8, 60, 127])
def test_place_compiles_for_few_routes(num_slots: int, kernels, tmp_path: Path) -> None:
    plan, ids_TK = DevicePlan(512, num_slots, torch.device("cpu")), torch.zeros((1, 8), dtype=torch.int32)
    plan.place_jointly(ids_TK, ahead=True)
    plan.place(ids_TK.expand(min(num_slots // 8, 4), 8).contiguous(), first=True)
    assert [spilled_bytes(kernel, tmp_path) for kernel in kernels["place_few_kernel"]] == [0, 0]


@pytest.mark.slow
def test_one_kernel_plans_prompts_of_any_length(kernels, tmp_path: Path) -> None:
    plan = DevicePlan(512, 256, torch.device("cpu"))
    for num_tokens in (2, 8, 300):
        plan_passing(plan, torch.zeros((num_tokens, 8), dtype=torch.int32), 2, size=16)
    assert len({id(kernel) for kernel in kernels["pass_kernel"]}) == 1
    assert spilled_bytes(kernels["pass_kernel"][0], tmp_path) <= 8


@triton.jit
def read_what_came(arrived_S1, record_B, out_B):
    await_chunks(arrived_S1, 3, 1000)
    b = tl.arange(0, 256)
    tl.store(out_B + b, tl.load(record_B + b))


@pytest.mark.slow
def test_records_are_read_behind_an_acquire(kernels) -> None:
    """One thread looks; the others, and every load of the record, are behind a barrier that follows it."""
    arrived_S1, record_B = torch.zeros(4, dtype=torch.int32), torch.zeros(256, dtype=torch.uint8)
    read_what_came[(1,)](arrived_S1, record_B, torch.empty_like(record_B), num_warps=2)
    (kernel,) = kernels["read_what_came"]
    instructions = re.findall(r"(?:atom|ld|bar)\.\S+", kernel.asm["ptx"])
    order = [name for name in instructions if not name.startswith(("ld.param", "ld.shared"))]
    looks = [at for at, name in enumerate(order) if "acquire" in name and "gpu" in name]
    reads = [at for at, name in enumerate(order) if name.startswith("ld.global") and at not in looks]
    assert len(looks) == 1 and reads, order
    assert "bar.sync" in order[looks[0] : reads[0]], order


@pytest.mark.slow
def test_fetch_reads_wide_words(kernels, tmp_path: Path) -> None:
    plan = DevicePlan(4, 2, torch.device("cpu"))
    records_EB, slab_SB = (torch.zeros((n, 2**17 + 256), dtype=torch.uint8) for n in (4, 2))
    plan.fetch(records_EB, slab_SB)
    plan.fetch_some(slab_SB, plan.slot_of_E, slab_SB)
    plan.fetch_in_turn(records_EB, slab_SB, cut=2**16)
    plain, _, in_turn = kernels["fetch_kernel"]
    assert all(re.search(r"ld\.global\S*\.v2\.b64", kernel.asm["ptx"]) for kernel in (plain, in_turn)), (
        "16 bytes"
    )
    counts = r"bar\.sync[^;]*;\s.*?(?:atom|red)\S*\.release\S*\.add"
    assert re.search(counts, in_turn.asm["ptx"], re.DOTALL), "counted when every thread has written its part"
    assert all(spilled_bytes(kernel, tmp_path) == 0 for kernel in kernels["fetch_kernel"])


@pytest.mark.slow
def test_early_kernels_compile(kernels, tmp_path: Path) -> None:
    nbytes = 2**17 + 256
    plan = DevicePlan(512, 256, torch.device("cpu"), num_early=2, record_bytes=nbytes)
    records_EB, slab_SB = (torch.zeros((n, nbytes), dtype=torch.uint8) for n in (4, 2))
    ids_TK = torch.zeros((4, 8), dtype=torch.int32)
    plan.place(ids_TK, first=True)
    plan.place(ids_TK, first=False)
    plan.plan_early(ids_TK)
    plan.fetch_early(records_EB, slab_SB)
    plan.fetch(records_EB, slab_SB)
    early = kernels["fetch_early_kernel"][0].asm["ptx"]
    assert re.search(r"ld\.global\S*\.v2\.b64", early), "16 bytes a load"
    assert len(re.findall(r"(?:ld|atom)\S*\.relaxed", early)) == 2, "the clock is looked at before each chunk"
    assert re.search(r"bar\.sync[^;]*;\s.*?atom\S*\.release\S*\.exch", early, re.DOTALL), (
        "reported when complete"
    )
    for name in ("place_kernel", "plan_early_kernel", "fetch_early_kernel", "fetch_kernel"):
        assert all(spilled_bytes(kernel, tmp_path) <= 8 for kernel in kernels[name]), name
