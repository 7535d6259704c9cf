"""Which kernel and which tiles: a pure function of problem, device and measured record.

What decides is the number of rows a slot gets, T * K / S, not T: 64 tokens over 128 experts are 4 rows each,
over 8 experts 64. Below a row a slot or so every route reads its own weights whatever one does, and the
direct kernels win by having less to launch; above, rows that share a slot must share its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from minisgl.moe.base import Problem
from minisgl.moe.workspace import DIRECT_MAX_TOKENS, FP8_FORMATS, largest_block_m, next_power_of_two

PACKED_FORMATS = ("int4", "mxfp4")
Threshold = int | Literal["auto"]


@dataclass(frozen=True)
class Tiles:
    """Launch options of one GEMM.

    block_k counts weights along K. group_m, swap, tma: grouped only (tma also direct with wide). wide: the direct
    kernel multiplies on the tensor cores. preload: K steps that the direct down kernel asks for ahead.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    group_m: int = 1
    swap: bool = False
    tma: bool = False
    wide: bool = False
    preload: int = 1


@dataclass(frozen=True)
class Choice:
    """Kernels of one step. block_m is shared by both GEMMs, which work on the same aligned blocks."""

    kernel: Literal["grouped", "direct"]
    block_m: int
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True)
class DeviceLimits:
    """What a choice must respect. shared_bytes: shared memory a block may use (232,448 on H200, 101,376 on RTX 50)."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    num_multiprocessors: int

    @staticmethod
    def of(device: torch.device) -> DeviceLimits:
        """Limits of a CUDA device; of the interpreter elsewhere."""
        if device.type != "cuda":
            return DeviceLimits("interpreter", (0, 0), 1 << 30, 1)
        properties = torch.cuda.get_device_properties(device)
        return DeviceLimits(
            properties.name,
            (properties.major, properties.minor),
            properties.shared_memory_per_block_optin,
            properties.multi_processor_count,
        )


Record = Mapping[int, Choice]  # bucket of tokens (a power of two) -> measured choice


def select(
    problem: Problem,
    limits: DeviceLimits,
    record: Record | None = None,
    small_m_threshold: Threshold = "auto",
) -> Choice:
    """The choice for this problem.

    small_m_threshold: N forces the direct kernels up to N tokens and forbids them above; "auto" lets the
    record, or else the heuristic, decide.
    """
    tokens = problem.num_tokens
    if small_m_threshold != "auto":
        if tokens <= small_m_threshold:
            measured = _lookup(record, tokens, "direct")
            return measured or direct_heuristic(problem, limits)
        measured = _lookup(record, tokens, "grouped")
        return measured or grouped_heuristic(problem, limits)
    measured = _lookup(record, tokens, None)
    if measured:
        return measured
    rows_per_slot = tokens * problem.top_k / problem.num_slots
    if tokens <= DIRECT_MAX_TOKENS and (tokens <= 2 or rows_per_slot <= 0.5):
        return direct_heuristic(problem, limits)
    return grouped_heuristic(problem, limits)


def _lookup(record: Record | None, tokens: int, kernel: str | None) -> Choice | None:
    if not record:
        return None
    choice = record.get(next_power_of_two(tokens))
    fits = choice is not None and (kernel is None or choice.kernel == kernel)
    return choice if fits and choice.block_m <= largest_block_m(tokens) else None


def direct_heuristic(problem: Problem, limits: DeviceLimits) -> Choice:
    """Tiles of the direct kernels: about 16 KB of weights a program in flight."""
    model_dim, hidden_dim = problem.shape.model_dim, problem.shape.hidden_dim
    if limits.name == "interpreter":
        tiles = Tiles(64, 128, 4, wide=problem.format in PACKED_FORMATS)
        return Choice("direct", 1, tiles, tiles)
    if problem.format in PACKED_FORMATS:
        block_k = max(32, min(128, problem.group_size or 128)) if model_dim % 128 or hidden_dim % 128 else 128
        up, down = Tiles(32, block_k, 4, 4, wide=True), Tiles(64, block_k, 4, 4, wide=True)
    elif problem.format == "fp8_block":
        up, down = Tiles(16, 128, 4, 3), Tiles(8, 128, 4)
    else:
        up = Tiles(8, _fit(model_dim, 512), 4, 2)
        down = Tiles(4, _fit(hidden_dim, 256), 4)
    return Choice("direct", 1, up, down)


def _fit(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides size, or covers most of it when none above 64 does."""
    block = most
    while block > 128 and size % block:
        block //= 2
    return block


def grouped_heuristic(problem: Problem, limits: DeviceLimits) -> Choice:
    """Tiles of the grouped kernels, small enough for 99 KB of shared memory."""
    block_m = grouped_block_m(problem)
    if limits.name == "interpreter":
        tiles = Tiles(64, 64, 4)
        return Choice("grouped", block_m, tiles, tiles)
    large = limits.shared_bytes > 160 * 1024
    stages = 4 if large else 3
    block_k = grouped_block_k(problem)
    if block_m <= 32:
        up = Tiles(64, block_k, 4, stages)
        down = Tiles(64, block_k, 4, stages)
    elif block_m == 64:
        up = Tiles(64, min(block_k, 64), 4, stages)
        down = Tiles(128, min(block_k, 64), 4, stages)
    else:
        wide = 128 if large else 64
        up = Tiles(wide, min(block_k, 64), 8, stages - 1, group_m=8)
        down = Tiles(128, min(block_k, 64), 8, stages - 1, group_m=8)
    return Choice("grouped", block_m, up, down)


def grouped_block_m(problem: Problem) -> int:
    """Rows a block: the next power of two of the expected rows a slot, so that most slots need one block."""
    rows_per_slot = problem.num_tokens * problem.top_k / problem.num_slots
    block_m = 16
    while block_m < rows_per_slot * 1.25 and block_m < largest_block_m(problem.num_tokens):
        block_m *= 2
    return block_m


def grouped_block_k(problem: Problem) -> int:
    """128 where it divides both K, else 64, else 32 (fp8: at least 64, of which its instructions take 32)."""
    for block_k in (128, 64):
        if problem.shape.model_dim % block_k == 0 and problem.shape.hidden_dim % block_k == 0:
            break
    else:
        block_k = 64 if problem.format in FP8_FORMATS else 32
    if problem.dtype == torch.float32:
        block_k = min(block_k, 32)
    return block_k
