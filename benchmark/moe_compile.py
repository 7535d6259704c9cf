"""Compile the MoE kernels for a GPU that isn't there, and say what each needs: shared memory, registers, spills.

    python benchmark/moe_compile.py --capability 120 --formats bf16,int4 --tokens 1,64,4096

Triton compiles down to a cubin without a device when its driver only has to name a target. So a pull request
can learn on any machine that a tile no longer fits the 99 KB of a consumer card, or that it spills.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minisgl.moe.base import ExpertShape, Placement, Problem, Routing, RoutingRule, Slab
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedStep
from minisgl.moe.kernels import launch
from minisgl.moe.select import Choice, DeviceLimits, direct_heuristic, grouped_heuristic
from minisgl.moe.workspace import Buffers, buffer_specs, next_power_of_two

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


class FakeDriver:
    """Just enough of a Triton driver to compile: it names the target and can't launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_current_device(self, device: int) -> None: ...


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel and what ptxas says of it."""

    name: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    ptx: str
    cubin: bytes


class Compiler:
    """While it is installed, launching a kernel compiles it and notes the result instead."""

    def __init__(self, capability: int) -> None:
        self.capability, self.compiled = capability, []
        triton.runtime.driver.set_active(FakeDriver(capability))
        run = JITFunction.run

        def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            self.compiled.append(self._inspect(function.__name__, kernel))
            return kernel

        JITFunction.run = compile_only
        launch.on_cuda = lambda device: True
        launch.has_dependent_launch = lambda device: capability >= 90

    def _inspect(self, name: str, kernel: Any) -> Compiled:
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        cubin = kernel.asm["cubin"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            tool = triton.knobs.nvidia.cuobjdump.path
            text = subprocess.run(
                [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
            ).stdout
        usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        return Compiled(
            name,
            kernel.metadata.shared,
            usage.get("REG", 0),
            usage.get("LOCAL", 0),
            usage.get("STACK", 0),
            kernel.asm["ptx"],
            cubin,
        )


def compile_step(problem: Problem, choice: Choice, slab: Slab) -> None:
    """Launch (that is: compile) every kernel of one step, and the router."""
    specs = buffer_specs(problem, next_power_of_two(problem.num_tokens))
    buffers = Buffers(**{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()})
    ids_TK = torch.zeros((problem.num_tokens, problem.top_k), dtype=torch.int32)
    routing = Routing(ids_TK, ids_TK.float())
    x_TD = torch.empty((problem.num_tokens, problem.shape.model_dim), dtype=problem.dtype)
    step = FusedStep(x_TD, routing, problem, choice, buffers)
    step._quantize = lambda x, codes, scale, rows, block_m: launch.quantize_rows(
        x, codes, scale, rows, buffers, block_m
    )
    step.run(Placement(slab, ids_TK))
    step.finish()


def make_slab(format_name: str, shape: ExpertShape, num_slots: int, group: int, symmetric: bool) -> Slab:
    weight_format = get_format(format_name, group_size=group, symmetric=symmetric)
    layout = weight_format.layout(shape)
    records = torch.empty((num_slots, layout.nbytes), dtype=torch.uint8)
    return Slab.of_records(weight_format.name, shape, layout, records)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--formats", default="none,fp8,int8,int4,fp8_block,mxfp4")
    parser.add_argument("--tokens", default="1,64,1024,4096")
    parser.add_argument("--dims", default="2048,768", help="D,F")
    options = parser.parse_args()
    compiler = Compiler(options.capability)
    limits = DeviceLimits("fake", divmod(options.capability, 10), SHARED_BYTES[options.capability], 132)
    model_dim, hidden_dim = (int(dim) for dim in options.dims.split(","))
    shape = ExpertShape(model_dim, hidden_dim)
    launch.route(torch.empty((1, 8)), RoutingRule(2), None, None)
    for name in options.formats.split(","):
        slab = make_slab(name, shape, 8, 128, True)
        for tokens in (int(count) for count in options.tokens.split(",")):
            problem = Problem(tokens, 8, 8, shape, slab.format, torch.bfloat16)
            choices = [grouped_heuristic(problem, limits)]
            if tokens <= 4:
                choices.append(direct_heuristic(problem, limits))
            for choice in choices:
                start = len(compiler.compiled)
                compile_step(problem, choice, slab)
                for kernel in compiler.compiled[start:]:
                    over = "  TOO MUCH SHARED MEMORY" if kernel.shared_bytes > limits.shared_bytes else ""
                    print(
                        f"{name:10} T={tokens:<5} {kernel.name:24} shared {kernel.shared_bytes:>7} "
                        f"registers {kernel.registers:>3} spills {kernel.spill_bytes} stack {kernel.stack_bytes}{over}"
                    )


if __name__ == "__main__":
    main()
