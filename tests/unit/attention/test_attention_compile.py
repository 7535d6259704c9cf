"""The attention kernels compile for GPUs that aren't here: they fit the shared memory of a consumer card and spill nothing.

Triton compiles down to a cubin when its driver merely names a target; launching is replaced by compiling.
"""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minisgl.attention import AttentionProblem
from minisgl.attention import triton_paged as tp
from minisgl.attention.reference import random_case
from minisgl.attention.store import launch_store

LIMITS = {90: tp.Limits(132, 227 * 1024, True), 120: tp.Limits(48, 99 * 1024, True)}


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


class OnPaper(tp.TritonAttention):
    """The backend on tensors that no GPU has seen."""

    def supports(self, problem: AttentionProblem, device: torch.device) -> str | None:
        return None


@pytest.fixture(params=sorted(LIMITS), ids=lambda capability: f"sm_{capability}")
def compiled(request, monkeypatch) -> tuple[tp.Limits, list[Any]]:
    """Limits of the device, and the list that collects what would have been launched."""
    if tp.INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(function, *args, grid, warmup, **options):
        kernels.append(run(function, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(triton.runtime.driver, "_active", NamedTarget(request.param))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(tp, "limits_of", lambda device: LIMITS[request.param])
    return LIMITS[request.param], kernels


def spilled_bytes(kernel: Any, folder) -> int:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (128, torch.bfloat16, {}),
        (64, torch.bfloat16, {"window": 128, "has_sinks": True, "page_size": 64}),
        (256, torch.bfloat16, {"soft_cap": 50.0, "page_size": 1}),
        (128, torch.float32, {}),
    ],
    ids=["qwen3", "gpt_oss", "gemma", "fp32"],
)
def test_default_tiles_fit_and_do_not_spill(compiled, tmp_path, head_dim, dtype, options):
    limits, kernels = compiled
    fields = {"num_heads": 16, "num_kv_heads": 2, "page_size": 16, "scale": 0.1, **options}
    problem = AttentionProblem(head_dim=head_dim, dtype=dtype, **fields)
    for lens in ([(1, 20), (1, 3)], [(40, 50)]):
        case = random_case(problem, lens)
        backend = OnPaper()
        plan = backend.plan(problem, case.batch)
        backend.forward(case.q_THC, case.cache, case.batch, plan, problem, case.sinks_H)
    new = case.q_THC[:, :2]
    launch_store(case.cache.k_PSGC, case.cache.v_PSGC, new, new, case.batch.write_slots_T)
    assert [kernel.metadata.name for kernel in kernels] == [
        "decode_kernel",
        "combine_kernel",
        "extend_kernel",
        "store_kernel",
    ]
    for kernel in kernels:
        assert kernel.metadata.shared <= limits.shared_bytes, kernel.metadata.name
        assert spilled_bytes(kernel, tmp_path) == 0, kernel.metadata.name


def test_tiles_follow_the_device_and_the_rows():
    problem = AttentionProblem(32, 4, head_dim=128, page_size=16, dtype=torch.bfloat16, scale=0.1)
    server, card = LIMITS[90], LIMITS[120]
    assert tp.choose_extend_tile(problem, 8192 * 8, server).block_n == 64
    assert tp.choose_extend_tile(problem, 8192 * 8, card).block_n == 32
    assert tp.choose_extend_tile(problem, 16, server).block_m == 16
    assert (
        tp.choose_decode_tile(problem, server).wave_programs
        > tp.choose_decode_tile(problem, card).wave_programs
    )
