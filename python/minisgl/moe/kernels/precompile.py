"""Compile kernels without launching them, also without a GPU: for tuning in parallel, and for checks in CI.

Triton's driver only has to name a target for a kernel to be compiled down to a cubin, which lands in Triton's
cache on disk. So worker processes that never touch the GPU fill that cache while another one measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minisgl.moe.base import Placement, Problem, Slab
from minisgl.moe.formats import get_format
from minisgl.moe.kernels import launch, launch_direct, launch_few_rows, launch_persistent
from minisgl.moe.select import Choice
from minisgl.moe.workspace import FP8_FORMATS, Buffers, buffer_specs, next_power_of_two


@dataclass(frozen=True)
class CompileTask:
    """Both GEMMs of one choice, for one problem. symmetric: of int4."""

    problem: Problem
    choice: Choice
    symmetric: bool = True


class TargetOnlyDriver:
    """Just enough of a Triton driver to compile: it names the target and can't launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...


def compile_only(capability: int, on_compiled: Callable[[str, Any], None] | None = None) -> None:
    """Make this process compile where it would launch, for good. on_compiled gets each kernel's name and itself."""
    triton.runtime.driver.set_active(TargetOnlyDriver(capability))
    run = JITFunction.run

    def warmup(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        if on_compiled is not None:
            on_compiled(function.__name__, kernel)
        return kernel

    JITFunction.run = warmup
    launch.on_cuda = lambda device: True
    launch.has_dependent_launch = lambda device: capability >= 90


def empty_slab(problem: Problem, symmetric: bool, device: torch.device) -> Slab:
    """A slab of the problem with undefined contents."""
    weight_format = get_format(problem.format, problem.dtype, problem.group_size or 128, symmetric)
    layout = weight_format.layout(problem.shape)
    records_SB = torch.empty((problem.num_slots, layout.nbytes), dtype=torch.uint8, device=device)
    return Slab.of_records(weight_format.name, problem.shape, layout, records_SB)


def compile_choice(task: CompileTask, small_kernels: bool = False) -> None:
    """Compile the GEMMs of a choice (and all other kernels of the step, if small_kernels); needs `compile_only`."""
    problem, choice = task.problem, task.choice
    slab = empty_slab(problem, task.symmetric, torch.device("cpu"))
    specs = buffer_specs(problem, next_power_of_two(problem.num_tokens))
    made = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    buffers = Buffers(**made, tile_counters=torch.zeros(2, dtype=torch.int32))
    shape, num_routes = problem.shape, problem.num_tokens * problem.top_k
    x_TD = torch.empty((problem.num_tokens, shape.model_dim), dtype=problem.dtype)
    placement = Placement(slab, torch.empty((problem.num_tokens, problem.top_k), dtype=torch.int32))
    weights_TK = torch.empty((problem.num_tokens, problem.top_k))
    rows_RD = buffers.rows_RD(num_routes, shape.model_dim, problem.dtype)
    if choice.kernel == "direct":
        launch_direct.direct_gate_up(x_TD, placement, problem, choice, True, buffers)
        if choice.down.wide:
            launch_direct.wide_down(rows_RD.float(), placement, problem, choice.down, buffers)
        else:
            launch_direct.direct_down(x_TD, placement, weights_TK, problem, choice, buffers, True)
        return
    if choice.kernel == "persistent":
        launch_persistent.gate_up_and_down(rows_RD, x_TD, slab, problem, choice, num_routes, buffers)
    else:
        gemms = launch_few_rows if choice.kernel == "few_rows" else launch
        gemms.gate_up(x_TD, slab, problem, choice, num_routes, buffers)
        gemms.down(rows_RD, slab, problem, choice, num_routes, buffers)
    if small_kernels:
        units = launch.sum_units(problem, choice)
        launch.align(x_TD, placement.slots_TK, slab.num_slots, problem, choice.block_m, True, buffers, units)
        launch.reduce(rows_RD, weights_TK, buffers, x_TD)
        if problem.format in FP8_FORMATS:
            launch.quantize_activated(problem, choice.block_m, num_routes, buffers)


def _quietly(task: CompileTask) -> str | None:
    try:
        compile_choice(task)
    except Exception as error:  # the same error will show, and be dealt with, where the candidate is measured
        return f"{type(error).__name__}: {error}"[:200]
    return None


class CompilePool:
    """Worker processes that compile tasks for one capability, filling Triton's cache on disk."""

    def __init__(self, capability: int, num_workers: int) -> None:
        self._pool = ProcessPoolExecutor(
            num_workers, get_context("spawn"), initializer=compile_only, initargs=(capability,)
        )

    def submit(self, tasks: Iterable[CompileTask]) -> list[Future]:
        return [self._pool.submit(_quietly, task) for task in tasks]

    def ahead(self, problem: Problem, choices: Sequence[Choice]) -> None:
        """Compile choices of a problem and wait for them; what fails to compile fails again where it is measured."""
        for future in self.submit(CompileTask(problem, choice) for choice in choices):
            future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
