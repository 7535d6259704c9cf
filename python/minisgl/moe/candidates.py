"""Which tiles are worth measuring for a problem on a device: a pure enumeration, and the neighbours of what has won.

The space is searched in two steps. First a sample of plain tiles; then, around the fastest of them, one option
at a time: a stage more, another number of warps, several column tiles a program. A full product of all options
would be thousands of kernels to compile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from minisgl.moe.base import Problem
from minisgl.moe.select import (
    CODES_PER_WORD,
    FEW_ROWS_LARGEST_BLOCK_M,
    FEW_ROWS_PAIR,
    PACKED_FORMATS,
    ROLES_BLOCK_M,
    Choice,
    DeviceLimits,
    Kernel,
    Tiles,
    can_be_persistent,
    can_have_roles,
    few_rows_heuristic,
    grouped_block_m,
    persistent_choice,
    reads_fragments,
    reads_words,
    roles_tiles,
)
from minisgl.moe.workspace import (
    DIRECT_MAX_TOKENS,
    FEW_ROWS_BLOCK_M,
    FP8_FORMATS,
    largest_block_m,
    next_power_of_two,
)

BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4, "int4": 0.5, "mxfp4": 0.5}  # 1 elsewhere
TILES_N = (1, 2, 3, 4, 6, 8)


def grouped_shared_bytes(problem: Problem, tiles: Tiles, block_m: int, halves: int) -> int:
    """Shared memory of the pipelined operands; halves is 2 for gate_up (gate and up), 1 for down."""
    weight = BYTES_PER_WEIGHT.get(problem.format, 1)
    x = 1 if problem.format in FP8_FORMATS else problem.dtype.itemsize
    rows = halves * tiles.block_n
    stage = tiles.block_k * (block_m * x + rows * weight)
    # Converted weights go back to shared memory, unless they are the operand that tensor cores take from registers.
    in_registers = weight == x or tiles.swap or block_m < 64
    return int(stage * tiles.num_stages + (0 if in_registers else rows * tiles.block_k * x))


def has_tma(problem: Problem, limits: DeviceLimits) -> bool:
    """Whether tensor descriptors can describe the weights: rows have to start on 16 bytes."""
    per_weight = BYTES_PER_WEIGHT.get(problem.format, 1)
    sizes = (problem.shape.model_dim, problem.shape.hidden_dim)
    return limits.capability >= (9, 0) and all(size * per_weight % 16 == 0 for size in sizes)


def _block_ks(problem: Problem, size: int) -> list[int]:
    widths = [128] if problem.format == "fp8_block" else [64, 128, 256]
    narrow = size < 64 and problem.format not in PACKED_FORMATS
    return [width for width in widths if size % width == 0] or [32 if narrow else 64]


def grouped_tiles(problem: Problem, limits: DeviceLimits, block_m: int, gemm: str) -> Iterator[Tiles]:
    """Candidates for one GEMM: enough bytes in flight to hide memory, few enough registers not to spill."""
    size = problem.shape.model_dim if gemm == "gate_up" else problem.shape.hidden_dim
    halves = 2 if gemm == "gate_up" else 1
    small, tma = block_m <= 32, has_tma(problem, limits)
    for rows in (64, 128, 256):
        for block_k in _block_ks(problem, size):
            for num_warps in (4,) if small or block_m * rows <= 64 * 128 else (4, 8):
                if not block_m * rows // (32 * num_warps) <= 128:
                    continue
                for stages in (2, 3, 4, 5):
                    for swap in (False, True):
                        group_m = 1 if small else 8
                        tiles = Tiles(rows // halves, block_k, num_warps, stages, group_m, swap, tma)
                        used = grouped_shared_bytes(problem, tiles, block_m, halves)
                        if 20 * 1024 <= used <= limits.shared_bytes - 1024:
                            yield tiles
                            if tma:
                                yield replace(tiles, tma=False)


def direct_tiles(problem: Problem, limits: DeviceLimits, gemm: str) -> Iterator[Tiles]:
    """Candidates of the direct kernels: on words where that is possible, else on single weights, and on the tensor cores
    (which fp8 can't use with unquantized rows)."""
    if problem.format not in FP8_FORMATS:
        yield from _wide_tiles(problem, limits, gemm)
    if reads_words(problem):
        yield from _words_tiles(problem, gemm)
    elif problem.format not in PACKED_FORMATS:
        yield from _plain_direct_tiles(problem, gemm)


def _words_tiles(problem: Problem, gemm: str) -> Iterator[Tiles]:
    """Tiles whose threads hold four words at a time, and 32 to 256 bytes of weights in all."""
    size = problem.shape.model_dim if gemm == "gate_up" else problem.shape.hidden_dim
    experts = 1 if gemm == "gate_up" else next_power_of_two(problem.top_k)
    for block_k in (128, 256, 512, 1024, 2048):
        if block_k > next_power_of_two(size):
            continue
        words, steps = block_k // CODES_PER_WORD[problem.format], -(-size // block_k)
        for num_warps in (1, 2, 4, 8):
            if experts * words < 128 * num_warps:
                continue
            for block_n in (1, 2, 4, 8, 16):
                rows = 2 * block_n if gemm == "gate_up" else block_n  # those of both tiles
                step_bytes = rows * experts * words * 4 // (32 * num_warps)
                for preload in sorted({1, min(2, steps), min(3, steps)}):
                    if rows >= 2 and step_bytes >= 32 and step_bytes * preload <= 256:
                        yield Tiles(block_n, block_k, num_warps, 1, preload=preload)


def _wide_tiles(problem: Problem, limits: DeviceLimits, gemm: str) -> Iterator[Tiles]:
    size = problem.shape.model_dim if gemm == "gate_up" else problem.shape.hidden_dim
    halves = 2 if gemm == "gate_up" else 1
    for rows in (16, 32, 64, 128):
        for block_k in _block_ks(problem, size):
            for num_warps in (1, 2, 4):
                if not 8 <= rows // num_warps <= 64:
                    continue
                for stages in (3, 5):
                    tiles = Tiles(rows // halves, block_k, num_warps, stages, wide=True)
                    yield tiles
                    if has_tma(problem, limits):
                        yield replace(tiles, tma=True)


def _plain_direct_tiles(problem: Problem, gemm: str) -> Iterator[Tiles]:
    size = problem.shape.model_dim if gemm == "gate_up" else problem.shape.hidden_dim
    widths = [128] if problem.format == "fp8_block" else [128, 256, 512, 1024, 2048]
    for block_k in widths:
        if block_k > next_power_of_two(size):
            continue
        for block_n in (1, 2, 4, 8, 16, 32):
            for num_warps in (1, 2, 4, 8):
                lanes = 32 * num_warps
                if gemm == "gate_up":
                    if 16 <= 2 * block_n * block_k / lanes <= 64:
                        yield Tiles(block_n, block_k, num_warps, 1)
                        yield Tiles(block_n, block_k, num_warps, 3)
                    continue
                held = next_power_of_two(problem.top_k) * block_n * block_k / lanes
                steps = -(-size // block_k)
                for preload in sorted({1, min(3, steps), min(6, steps)}):
                    bytes_held = held * preload * BYTES_PER_WEIGHT.get(problem.format, 1)
                    if 8 <= held <= 64 and bytes_held <= 512:
                        yield Tiles(block_n, block_k, num_warps, 1, preload=preload)


def few_rows_tiles(block_m: int, gemm: str) -> Iterator[Tiles]:
    """Candidates of the kernels for few rows: how many rows a warp and a program have, how many words are in flight."""
    for num_warps in (1, 2, 4):
        for pairs in (1, 2, 4):
            for preload in (1, 2, 4):
                for stages in (1, 2):
                    if pairs * (preload * stages + block_m // 8) <= 12:  # registers
                        block_n = pairs * FEW_ROWS_PAIR[gemm] * num_warps
                        yield Tiles(block_n, 128, num_warps, stages, preload=preload)


def neighbours(
    problem: Problem, limits: DeviceLimits, kernel: Kernel, block_m: int, gemm: str, tiles: Tiles
) -> Iterator[Tiles]:
    """Tiles that differ from these in one option."""
    if tiles.roles:
        yield from (replace(tiles, group_m=n) for n in (1, 4, 8) if n != tiles.group_m)
        return
    changes: list[dict[str, Any]] = [{"num_warps": n} for n in (tiles.num_warps * 2, tiles.num_warps // 2)]
    changes += [{"num_stages": n} for n in (tiles.num_stages + 1, tiles.num_stages - 1)]
    if kernel != "grouped":
        changes += [{"block_n": n} for n in (tiles.block_n * 2, tiles.block_n // 2)]
        changes += [{"preload": n} for n in (tiles.preload + 1, tiles.preload - 1)]
        if kernel == "direct" and not tiles.wide and reads_words(problem):
            changes += [{"registers": n} for n in (0, 64, 128) if n != tiles.registers]
    else:
        changes += [{"tiles_n": n} for n in TILES_N] + [{"group_m": n} for n in (1, 4, 16)]
        changes += [{"swap": not tiles.swap}]
    if has_tma(problem, limits) and (kernel == "grouped" or tiles.wide):
        changes += [{"tma": not tiles.tma}]
    for change in changes:
        neighbour = replace(tiles, **change)
        if _sensible(problem, limits, kernel, block_m, gemm, neighbour):
            yield neighbour


def _sensible(
    problem: Problem, limits: DeviceLimits, kernel: Kernel, block_m: int, gemm: str, tiles: Tiles
) -> bool:
    if not (1 <= tiles.num_warps <= 8 and 1 <= tiles.num_stages <= 6 and tiles.preload >= 1):
        return False
    halves = 2 if gemm == "gate_up" else 1
    rows = halves * tiles.block_n
    if kernel == "few_rows":
        whole = tiles.block_n % (FEW_ROWS_PAIR[gemm] * tiles.num_warps) == 0
        return whole and rows <= 256 and tiles.preload <= 4 and tiles.num_stages <= 2
    if kernel == "direct":
        return rows >= (16 if tiles.wide else halves) and rows <= 256
    size = problem.shape.hidden_dim if gemm == "gate_up" else problem.shape.model_dim
    if tiles.num_warps < 4 or tiles.tiles_n > -(-size // tiles.block_n):
        return False
    if block_m * rows // (32 * tiles.num_warps) > 128:
        return False
    return grouped_shared_bytes(problem, tiles, block_m, halves) <= limits.shared_bytes - 1024


def block_m_candidates(problem: Problem) -> list[int]:
    """The heuristic's BLOCK_M and its neighbours."""
    centre = grouped_block_m(problem)
    largest = largest_block_m(problem.num_tokens)
    return sorted({min(max(block, 16), largest) for block in (centre // 2, centre, centre * 2)})


def _roles_blocks(problem: Problem, limits: DeviceLimits) -> tuple[int, ...]:
    if not can_have_roles(problem, limits):
        return ()
    return (16, 32, ROLES_BLOCK_M) if problem.format in PACKED_FORMATS else (ROLES_BLOCK_M,)


def spread(tiles: Iterator[Tiles], most: int) -> list[Tiles]:
    """At most `most` of the candidates: a sample, the same at every call. (Every n-th would fall into step with the
    loops that made them, and leave out all of one kind.)"""
    every = list(tiles)
    return every if len(every) <= most else random.Random(0).sample(every, most)


def persistent_choices(problem: Problem, limits: DeviceLimits) -> list[Choice]:
    """Candidates of the kernel for both GEMMs, which can't be measured apart."""
    if not can_be_persistent(problem, limits):
        return []
    one_program = [
        persistent_choice(problem, block_m, consumers, group_m)
        for block_m in block_m_candidates(problem)
        for consumers in (1, 2)
        for group_m in ((1, 4) if block_m >= 64 else (1,))
    ]
    small = [block_m for block_m in block_m_candidates(problem) if block_m <= 32]
    return [*one_program, *(persistent_choice(problem, block_m, programs=2) for block_m in small)]


def candidates(
    problem: Problem, limits: DeviceLimits, most: int = 32
) -> list[tuple[Kernel, int, list[Tiles], list[Tiles]]]:
    """(kernel, block_m, tiles of gate_up, tiles of down) to measure, at most `most` tiles of each."""
    found: list[tuple[Kernel, int, list[Tiles], list[Tiles]]] = []
    if problem.num_tokens <= min(16, DIRECT_MAX_TOKENS):
        ups, downs = (spread(direct_tiles(problem, limits, gemm), most) for gemm in ("gate_up", "down"))
        found.append(("direct", 1, ups, downs))
    if reads_fragments(problem, limits):
        centre = few_rows_heuristic(problem).block_m
        blocks = {centre, max(centre // 2, FEW_ROWS_BLOCK_M), min(centre * 2, FEW_ROWS_LARGEST_BLOCK_M)}
        for block_m in sorted(block for block in blocks if block <= largest_block_m(problem.num_tokens)):
            ups, downs = (spread(few_rows_tiles(block_m, gemm), most) for gemm in ("gate_up", "down"))
            found.append(("few_rows", block_m, ups, downs))
    for block_m in block_m_candidates(problem):
        ups, downs = (
            spread(grouped_tiles(problem, limits, block_m, gemm), most) for gemm in ("gate_up", "down")
        )
        if block_m in _roles_blocks(problem, limits):
            up, down = roles_tiles(problem, block_m)
            ups, downs = [up, *ups], [down, *downs]
        if ups and downs:
            found.append(("grouped", block_m, ups, downs))
    return found
