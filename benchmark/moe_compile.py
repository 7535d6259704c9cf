"""Compile the MoE kernels for a GPU that isn't there, and say what each needs: shared memory, registers, stack.

    python benchmark/moe_compile.py --capability 120 --formats none,int4 --tokens 1,64,4096

Exits 1 if a kernel wants more shared memory than the card's blocks may have. So a change can learn on any
machine that a tile no longer fits the 99 KB of a consumer card, or that registers spill (stack > 0).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from minisgl.moe.base import ExpertShape, Problem, RoutingRule
from minisgl.moe.formats import get_format
from minisgl.moe.kernels import launch
from minisgl.moe.kernels.precompile import CompileTask, compile_choice, compile_only
from minisgl.moe.select import DeviceLimits, direct_heuristic, grouped_heuristic

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel and what it needs."""

    name: str
    shared_bytes: int
    registers: int
    stack_bytes: int


def inspect(name: str, kernel: Any) -> Compiled:
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return Compiled(name, kernel.metadata.shared, usage.get("REG", 0), usage.get("STACK", 0))


def problems(options: argparse.Namespace) -> list[Problem]:
    model_dim, hidden_dim = (int(dim) for dim in options.dims.split(","))
    groups = {"int4": options.group, "mxfp4": 32, "fp8_block": 128}
    return [
        Problem(
            num_tokens=int(tokens),
            top_k=8,
            num_slots=128,
            shape=ExpertShape(model_dim, hidden_dim),
            format=get_format(name).name,
            dtype=torch.bfloat16,
            group_size=groups.get(name, 0),
        )
        for name in options.formats.split(",")
        for tokens in options.tokens.split(",")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--formats", default="none,fp8,int8,int4,fp8_block,mxfp4")
    parser.add_argument("--tokens", default="1,64,1024,4096")
    parser.add_argument("--dims", default="2048,768", help="D,F")
    parser.add_argument("--group", type=int, default=128, help="of int4")
    options = parser.parse_args()
    compiled: list[Compiled] = []
    compile_only(options.capability, lambda name, kernel: compiled.append(inspect(name, kernel)))
    shared_bytes = SHARED_BYTES[options.capability]
    limits = DeviceLimits("", divmod(options.capability, 10), shared_bytes, 1)
    launch.route(torch.empty((1, 128), dtype=torch.bfloat16), RoutingRule(8), None, None)
    too_much = 0
    for problem in problems(options):
        choices = [grouped_heuristic(problem, limits)]
        if problem.num_tokens <= 16:
            choices.append(direct_heuristic(problem, limits))
        for choice in choices:
            compile_choice(CompileTask(problem, choice), small_kernels=True)
        for kernel in compiled:
            over = kernel.shared_bytes > shared_bytes
            too_much += over
            print(
                f"{problem.format:10} T={problem.num_tokens:<5} {kernel.name:26} shared {kernel.shared_bytes:>7} "
                f"registers {kernel.registers:>3} stack {kernel.stack_bytes}{'  TOO MUCH' if over else ''}"
            )
        compiled.clear()
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
