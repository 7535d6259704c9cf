"""Which kernel and which tiles: a pure function of problem, device and measured record.

What decides is the number of rows a slot gets, T * K / S, not T: 64 tokens over 128 experts are 4 rows each,
over 8 experts 64. Below a row a slot or so every route reads its own weights whatever one does, and the
direct kernels win by having less to launch; above, rows that share a slot must share its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from minisgl.moe.base import Problem
from minisgl.moe.workspace import (
    DIRECT_MAX_TOKENS,
    FEW_ROWS_BLOCK_M,
    FEW_ROWS_GROUP,
    FEW_ROWS_MAX_TOKENS,
    FP8_FORMATS,
    MAX_BLOCK_M,
    largest_block_m,
    next_power_of_two,
)

PACKED_FORMATS = ("int4", "mxfp4")
BYTE_FORMATS = (*FP8_FORMATS, *PACKED_FORMATS, "int8")  # at most a byte a weight
CODES_PER_WORD = {"bf16": 2, "int4": 8, "mxfp4": 8, "int8": 4, "fp8": 4, "fp8_block": 4}  # see kernels.words
Threshold = int | Literal["auto"]
Kernel = Literal["grouped", "few_rows", "persistent", "direct"]
# Hidden units or outputs of a warp's pair of tiles, see kernels.fragments.
FEW_ROWS_PAIR = {"gate_up": 8, "down": 16}
FEW_ROWS_LARGEST_BLOCK_M = 32  # four columns of eight rows
ROLES_BLOCK_M = 128
WORDS_FEW_ROWS = 20  # a slot: so that hardly one has more than 32
HOPPER_SHARED_BYTES = 232_448
PERSISTENT_ROW_BYTES = 128  # of each row in a step of the persistent kernel
PERSISTENT_SPARE_BYTES = 5 * 1024  # of shared memory, beside its buffers
FEW_ROWS_A_SLOT = 4  # up to here, and from more than half a row on, they were measured to be the fastest


@dataclass(frozen=True)
class Tiles:
    """Launch options of one GEMM.

    block_k counts weights along K. group_m, swap, tma: grouped only (tma also direct with wide). wide: the direct
    kernel multiplies on the tensor cores. preload: K steps that the direct down kernel, and those for few rows, ask for
    ahead. tiles_n: column tiles a grouped program works on one after the other. roles: warps of a grouped program load
    or multiply, see `kernels.hopper` and, of 4 bits, `kernels.hopper_words`. The two GEMMs of the persistent kernel
    share all but block_n. registers: at most so many a thread of the direct kernels on words, so that more programs run at a
    time; 0: as many as the compiler takes.
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
    tiles_n: int = 1
    roles: bool = False
    registers: int = 0


@dataclass(frozen=True)
class Choice:
    """Kernels of one step. block_m is shared by both GEMMs, which work on the same aligned blocks."""

    kernel: Kernel
    block_m: int
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True)
class DeviceLimits:
    """What a choice must respect. shared_bytes: shared memory a block may use (232,448 on H200, 101,376 on RTX 50). gluon:
    whether kernels can be compiled that are written in it."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    num_multiprocessors: int
    gluon: bool = False

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
            has_gluon(),
        )


def has_gluon() -> bool:
    """Whether the running Triton has Gluon as `kernels.hopper` uses it: its names still change from version to version."""
    return triton.__version__.startswith("3.6.")


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
        direct = tokens <= small_m_threshold
        measured = _lookup(record, tokens, direct)
        return measured or (direct_heuristic if direct else _shared_heuristic)(problem, limits)
    measured = _lookup(record, tokens, None)
    if measured:
        return measured
    if tokens <= DIRECT_MAX_TOKENS and (tokens <= 2 or problem.rows_per_slot <= 0.5):
        return direct_heuristic(problem, limits)
    return _shared_heuristic(problem, limits)


def _shared_heuristic(problem: Problem, limits: DeviceLimits) -> Choice:
    """Kernels whose rows share a slot's weights: those for few rows only where they were measured, on Hopper."""
    measured = limits.capability == (9, 0) and problem.rows_per_slot <= FEW_ROWS_A_SLOT
    if measured and reads_fragments(problem, limits):
        return few_rows_heuristic(problem)
    if can_be_persistent(problem, limits) and problem.rows_per_slot * 1.25 <= MAX_BLOCK_M:
        return persistent_heuristic(problem)
    return grouped_heuristic(problem, limits)


def _lookup(record: Record | None, tokens: int, direct: bool | None) -> Choice | None:
    """The choice of the nearest measured bucket: the next larger one, whose blocks fit more rows, else the largest."""
    fitting = {
        bucket: choice
        for bucket, choice in (record or {}).items()
        if direct in (None, choice.kernel == "direct") and _allowed(choice, tokens)
    }
    if not fitting:
        return None
    larger = [bucket for bucket in fitting if bucket >= tokens]
    return fitting[min(larger) if larger else max(fitting)]


def _allowed(choice: Choice, tokens: int) -> bool:
    """Direct kernels keep float32 rows, for which the workspace has room up to a number of tokens; so do those for few rows
    with x in another order."""
    if choice.kernel == "direct":
        return tokens <= DIRECT_MAX_TOKENS
    if choice.kernel == "few_rows" and next_power_of_two(tokens) > FEW_ROWS_MAX_TOKENS:
        return False
    return choice.block_m <= largest_block_m(tokens)


def direct_heuristic(problem: Problem, limits: DeviceLimits) -> Choice:
    """Tiles of the direct kernels: about 16 KB of weights a program in flight."""
    model_dim, hidden_dim = problem.shape.model_dim, problem.shape.hidden_dim
    if limits.name == "interpreter":
        tiles = Tiles(64, 128, 4, wide=problem.format in PACKED_FORMATS)
        return Choice("direct", 1, tiles, tiles)
    if reads_words(problem):
        return _words_heuristic(problem)
    if problem.format in PACKED_FORMATS:
        block_k = grouped_block_k(problem)
        up, down = Tiles(64, block_k, 4, 3, wide=True), Tiles(128, block_k, 4, 3, wide=True)
    elif problem.format == "fp8_block":
        up, down = Tiles(16, 128, 4, 3), Tiles(8, 128, 4)
    else:
        up = Tiles(4, _fit(model_dim, 512), 4)
        down = Tiles(4, _fit(hidden_dim, 256), 4)
    return Choice("direct", 1, up, down)


def reads_words(problem: Problem) -> bool:
    """Whether compiled direct kernels can read 32-bit words: rows are made of whole ones, activations are bf16."""
    per_word = CODES_PER_WORD.get(problem.format)
    if per_word is None or problem.dtype != torch.bfloat16:
        return False
    return problem.shape.model_dim % per_word == 0 and problem.shape.hidden_dim % per_word == 0


def reads_fragments(problem: Problem, limits: DeviceLimits) -> bool:
    """Whether weights can go from loads straight into products: int4 in groups of 128, compiled, activations bf16."""
    fits = next_power_of_two(problem.num_tokens) <= FEW_ROWS_MAX_TOKENS and limits.capability >= (8, 0)
    grouped = problem.format == "int4" and problem.group_size == FEW_ROWS_GROUP
    return fits and grouped and problem.dtype == torch.bfloat16


def few_rows_heuristic(problem: Problem) -> Choice:
    """Blocks that hold all rows of most slots, and the tiles that won on an H200 at Qwen3-30B-A3B dims."""
    block_m = FEW_ROWS_BLOCK_M
    while block_m < 1.5 * problem.rows_per_slot and block_m < FEW_ROWS_LARGEST_BLOCK_M:
        block_m *= 2
    block_m = min(block_m, largest_block_m(problem.num_tokens))
    return Choice("few_rows", block_m, Tiles(64, 128, 4, preload=2), Tiles(32, 128, 1, 2, preload=2))


def _words_heuristic(problem: Problem) -> Choice:
    """Whole rows at a time as far as registers go; as many warps as leave every thread four words of a row."""
    per_word, experts = CODES_PER_WORD[problem.format], next_power_of_two(problem.top_k)
    wide, narrow = _covering(problem.shape.model_dim, 2048), _covering(problem.shape.hidden_dim, 256)
    up_warps = min(max(wide // per_word // 128, 1), 2)
    down_warps = min(max(experts * narrow // per_word // 128, 1), 4)
    return Choice(
        "direct",
        1,
        Tiles(4 if per_word == 8 else 2, wide, up_warps, preload=2),
        Tiles(2 if per_word == 2 else 4, narrow, down_warps, preload=3 if problem.num_tokens == 1 else 1),
    )


def _covering(size: int, most: int) -> int:
    """The largest power of two from 128 up to `most` whose multiples exceed size by at most an eighth, else 128."""
    block = most
    while block > 128 and -size % block > size // 8:
        block //= 2
    return block


def _fit(size: int, most: int) -> int:
    """The largest power of two from 128 up to `most` that divides size; 128, with a tail, if none does."""
    block = most
    while block > 128 and size % block:
        block //= 2
    return block


# Tiles that won on an H200 at Qwen3-30B-A3B dims, by format and whether blocks are small (at most 32 rows) or large.
_HOPPER = {
    ("native", "small"): (Tiles(64, 128, 4, 4, swap=True), Tiles(128, 128, 4, 3, swap=True)),
    ("fp8", "small"): (Tiles(64, 256, 4, 3, swap=True), Tiles(128, 128, 4, 4, swap=True)),
    ("int8", "small"): (Tiles(64, 256, 4, 3), Tiles(64, 128, 4, 4, swap=True)),
    ("int4", "small"): (Tiles(128, 128, 4, 3), Tiles(128, 128, 4, 3, swap=True)),
    ("native", "large"): (Tiles(128, 64, 8, 4, 8), Tiles(256, 64, 8, 4, 8)),
    ("fp8", "large"): (Tiles(128, 128, 8, 4, 8), Tiles(128, 128, 4, 3, 8)),
    ("fp8_block", "large"): (Tiles(64, 128, 4, 4, 8, True, True), Tiles(128, 128, 4, 4, 8, True, True)),
    ("int8", "large"): (Tiles(64, 64, 4, 4, 8, swap=True), Tiles(128, 64, 4, 4, 8, swap=True)),
    ("int4", "large"): (Tiles(128, 64, 8, 3, 8, swap=True), Tiles(256, 64, 8, 3, 8, swap=True)),
}


def grouped_heuristic(problem: Problem, limits: DeviceLimits) -> Choice:
    """Tiles of the grouped kernels; elsewhere than on Hopper small enough for 99 KB of shared memory."""
    block_m = grouped_block_m(problem)
    if limits.name == "interpreter":
        tiles = Tiles(64, 64, 4)
        return Choice("grouped", block_m, tiles, tiles)
    if limits.capability == (9, 0) and problem.dtype != torch.float32:
        packed = problem.format in PACKED_FORMATS
        if can_have_roles(problem, limits) and (packed or block_m == ROLES_BLOCK_M):
            block_m = roles_block_m(problem)
            return Choice("grouped", block_m, *roles_tiles(problem, block_m))
        return _hopper_heuristic(problem, block_m)
    block_k = grouped_block_k(problem)
    short_k = min(block_k, 64)
    if block_m <= 32:
        narrow = 1 if problem.format in BYTE_FORMATS else 2
        up, down = Tiles(64 // narrow, block_k, 4, 4), Tiles(128 // narrow, block_k, 4, 4)
    elif block_m == 64:
        up, down = Tiles(64, short_k, 4, 3), Tiles(128, short_k, 4, 3)
    else:
        up, down = Tiles(64, short_k, 8, 3, 8), Tiles(128, short_k, 8, 3, 8)
    return Choice("grouped", block_m, up, down)


def can_have_roles(problem: Problem, limits: DeviceLimits) -> bool:
    """Whether `kernels.hopper` or, of 4 bits, `kernels.hopper_words` can multiply: no biases, SwiGLU, and sizes that its
    tiles divide; of mxfp4 also what gpt-oss has."""
    shape, dtype = problem.shape, problem.dtype
    if not (limits.gluon and limits.capability == (9, 0) and limits.shared_bytes >= HOPPER_SHARED_BYTES):
        return False
    if problem.format == "mxfp4":
        divides = shape.model_dim % 64 == 0 and shape.hidden_dim % 64 == 0
        return dtype == torch.bfloat16 and divides and problem.activation in ("silu", "gpt_oss")
    known = problem.format in ("bf16", "fp16", "fp8") and dtype != torch.float32
    words = problem.format == "int4" and problem.group_size == 128 and dtype == torch.bfloat16
    plain = not shape.bias and problem.activation == "silu"
    return plain and (known or words) and shape.model_dim % 256 == 0 and shape.hidden_dim % 128 == 0


def roles_block_m(problem: Problem) -> int:
    """Rows a block: with 4-bit weights, for which as many are read as there are, what holds all rows of most slots."""
    block_m, rows = ROLES_BLOCK_M, problem.rows_per_slot
    if problem.format in PACKED_FORMATS and rows <= WORDS_FEW_ROWS:
        block_m = 16 if problem.format == "mxfp4" and rows <= WORDS_FEW_ROWS / 2 else 32
    return min(block_m, largest_block_m(problem.num_tokens))


def roles_tiles(problem: Problem, block_m: int = ROLES_BLOCK_M) -> tuple[Tiles, Tiles]:
    """256 rows of weights, and as many stages as fit. A step is 128 bytes of a row, of 4-bit weights with large blocks 64."""
    packed, few = problem.format in PACKED_FORMATS, block_m <= 32
    tiles = []
    for size, block_n in ((problem.shape.model_dim, 128), (problem.shape.hidden_dim, 256)):
        block_k = 128 if packed or problem.format in FP8_FORMATS else 64
        if packed and few and size % 256 == 0 and not (problem.format == "mxfp4" and block_m > 16):
            block_k = 256
        stages = 8 if packed and few and block_k == 128 else 4
        tiles.append(Tiles(block_n, block_k, 4, stages, 8 if packed and not few else 1, tma=True, roles=True))
    return tiles[0], tiles[1]


def can_be_persistent(problem: Problem, limits: DeviceLimits) -> bool:
    """Whether `kernels.persistent` can multiply: the sizes and formats of `kernels.hopper`, and int8 times bf16."""
    if problem.format == "int8" and problem.dtype == torch.bfloat16:
        problem = replace(problem, format="bf16")
    return problem.format in ("bf16", "fp16", "fp8") and can_have_roles(problem, limits)


def persistent_heuristic(problem: Problem) -> Choice:
    """One block a slot, mostly. A second consumer where there is much to multiply; int8, which is converted by those that
    multiply, has two programs a multiprocessor where blocks are small, and blocks of at most 64 rows."""
    block_m, int8 = grouped_block_m(problem), problem.format == "int8"
    if int8 and block_m >= 64:
        return persistent_choice(problem, 64, consumers=2, group_m=4)
    if block_m >= 64:
        return persistent_choice(problem, block_m, consumers=2 if block_m == MAX_BLOCK_M else 1)
    return persistent_choice(problem, block_m, programs=2 if int8 else 1)


def persistent_choice(
    problem: Problem, block_m: int, consumers: int = 1, group_m: int = 1, programs: int = 1
) -> Choice:
    """consumers: groups of four warps that multiply, each with 128 rows of weights. programs: a multiprocessor, which have as
    many stages as fit."""
    stages = (HOPPER_SHARED_BYTES // programs - PERSISTENT_SPARE_BYTES) // _persistent_stage(
        problem, block_m, consumers
    )
    block_k = 128 if problem.format in BYTE_FORMATS else 64
    up = Tiles(64 * consumers, block_k, 4, stages, group_m, tma=True)
    return Choice("persistent", block_m, up, replace(up, block_n=128 * consumers))


def _persistent_stage(problem: Problem, block_m: int, consumers: int) -> int:
    """Bytes of a buffer. int8 has rows of 16 bits."""
    return PERSISTENT_ROW_BYTES * (128 * consumers + block_m * (2 if problem.format == "int8" else 1))


def persistent_programs(problem: Problem, choice: Choice) -> int:
    """How many programs of the persistent kernel a multiprocessor has: as many as its buffers leave room for, up to two."""
    used = choice.gate_up.num_stages * _persistent_stage(
        problem, choice.block_m, choice.gate_up.block_n // 64
    )
    return 2 if used + PERSISTENT_SPARE_BYTES <= HOPPER_SHARED_BYTES // 2 else 1


def _hopper_heuristic(problem: Problem, block_m: int) -> Choice:
    kinds = {"fp8": "fp8", "fp8_block": "fp8", "int8": "int8", "int4": "int4", "mxfp4": "int4"}
    kind = kinds.get(problem.format, "native")
    if kind == "int4" or problem.format == "fp8_block":
        block_m = min(block_m, 64)  # 128 don't fit registers beside unpacked weights or a second sum
    size = "small" if block_m <= 32 else "large"
    up, down = _HOPPER.get((problem.format, size)) or _HOPPER[kind, size]
    most = grouped_block_k(problem) if problem.format == "fp8_block" else 256
    # The four numbers of a word are multiplied apart, and a product needs 16 columns.
    least = 64 if problem.format in PACKED_FORMATS else 32
    divides = [width for width in (32, 64, 128, 256) if least <= width <= most]

    def fitted(tiles: Tiles, size: int) -> Tiles:
        widths = [w for w in divides if w <= tiles.block_k and size % w == 0] or [grouped_block_k(problem)]
        return replace(tiles, block_k=max(widths), tma=tiles.tma and size % 16 == 0)

    return Choice(
        "grouped", block_m, fitted(up, problem.shape.model_dim), fitted(down, problem.shape.hidden_dim)
    )


def grouped_block_m(problem: Problem) -> int:
    """Rows a block: the next power of two of the expected rows a slot, so that most slots need one block."""
    block_m = 16
    while block_m < problem.rows_per_slot * 1.25 and block_m < largest_block_m(problem.num_tokens):
        block_m *= 2
    return block_m


def grouped_block_k(problem: Problem) -> int:
    """128 where it divides both K, else 64, else 32; at least 64 for 4-bit weights, whose words share a step, and fp8."""
    model_dim, hidden_dim = problem.shape.model_dim, problem.shape.hidden_dim
    widths = [width for width in (128, 64) if model_dim % width == 0 and hidden_dim % width == 0]
    block_k = widths[0] if widths else 32
    if problem.dtype == torch.float32:
        block_k = min(block_k, 32)  # twice the bytes, and ordinary cores that want smaller tiles
    return max(block_k, 64) if problem.format in (*PACKED_FORMATS, *FP8_FORMATS) else block_k
