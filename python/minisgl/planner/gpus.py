"""What GPUs that people own can do, from their makers' data sheets: for plans about a machine that is not this one."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Data-sheet numbers. memory_gib; read_gbps: memory bandwidth in GB/s; tflops: dense 16-bit matrix products with fp32 sums,
    in TFLOP/s; link_gbps: PCIe as the card has it, one direction in GB/s before protocol (a slot may offer less);
    capability: CUDA's.
    """

    name: str
    memory_gib: float
    read_gbps: float
    tflops: float
    link_gbps: float
    capability: tuple[int, int]


_GEN3_X16 = _GEN4_X8 = 15.75
_GEN4_X16 = _GEN5_X8 = 31.5
_GEN5_X16 = 63.0

GPUS: tuple[Gpu, ...] = (
    Gpu("RTX 3060", 12, 360, 25.5, _GEN4_X16, (8, 6)),
    Gpu("RTX 3080", 10, 760, 59.5, _GEN4_X16, (8, 6)),
    Gpu("RTX 3090", 24, 936, 71, _GEN4_X16, (8, 6)),
    Gpu("RTX 4060", 8, 272, 30, _GEN4_X8, (8, 9)),
    Gpu("RTX 4060 Ti", 16, 288, 44, _GEN4_X8, (8, 9)),
    Gpu("RTX 4070", 12, 504, 58, _GEN4_X16, (8, 9)),
    Gpu("RTX 4070 Ti", 12, 504, 80, _GEN4_X16, (8, 9)),
    Gpu("RTX 4070 Ti SUPER", 16, 672, 88, _GEN4_X16, (8, 9)),
    Gpu("RTX 4080", 16, 717, 97, _GEN4_X16, (8, 9)),
    Gpu("RTX 4090", 24, 1008, 165, _GEN4_X16, (8, 9)),
    Gpu("RTX 5060 Ti", 16, 448, 47, _GEN5_X8, (12, 0)),
    Gpu("RTX 5070", 12, 672, 62, _GEN5_X16, (12, 0)),
    Gpu("RTX 5070 Ti", 16, 896, 88, _GEN5_X16, (12, 0)),
    Gpu("RTX 5080", 16, 960, 113, _GEN5_X16, (12, 0)),
    Gpu("RTX 5090", 32, 1792, 210, _GEN5_X16, (12, 0)),
    Gpu("T4", 16, 320, 65, _GEN3_X16, (7, 5)),
    Gpu("L4", 24, 300, 121, _GEN4_X16, (8, 9)),
    Gpu("L40S", 48, 864, 362, _GEN4_X16, (8, 9)),
    Gpu("A100 40GB", 40, 1555, 312, _GEN4_X16, (8, 0)),
    Gpu("A100 80GB", 80, 2039, 312, _GEN4_X16, (8, 0)),
    Gpu("H100", 80, 3350, 989, _GEN5_X16, (9, 0)),
    Gpu("H200", 141, 4800, 989, _GEN5_X16, (9, 0)),
)


def find_gpu(name: str) -> Gpu:
    """The GPU that `name` means: case, spaces and makers' prefixes don't matter. ValueError lists the known ones."""
    wanted = _key(name)
    for gpu in GPUS:
        if _key(gpu.name) == wanted:
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ValueError(
        f"--gpu {name!r} is unknown; known are {known}. For another one give --gpu-memory and the nearest of these"
    )


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
