"""The Triton backend: launches the kernels of this folder. Nothing here depends on what the batch holds, only on its shapes.

    decode (every request one row)   decode_kernel -> combine_kernel
    extend (anything else)           extend_kernel, and for rows that are alone in their request, when keys may be many, decode
                                     and combine as well: one tile of extend would walk a long context all by itself

`plan` reads no device memory, so it costs no synchronisation and holds for a captured graph whatever the tensors hold later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from minisgl.attention.base import AttentionBatch, AttentionProblem, LayerCache
from minisgl.attention.extend_kernels import extend_kernel
from minisgl.attention.kernels import LOG2E, LONG_CHUNK, combine_kernel, decode_kernel

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
BATCH_BLOCKS = (
    16,
    64,
    *(256 << n for n in range(12)),
)  # requests that a program looks at, in few compiled variants
FEW_REQUESTS = 8  # up to here combining is latency, and takes all chunks of a usual context at once


@dataclass(frozen=True)
class DecodeTile:
    """block_n keys a step. wave_programs: programs that fill the device once; chunks are cut for that many."""

    block_n: int
    num_warps: int
    num_stages: int
    wave_programs: int


@dataclass(frozen=True)
class ExtendTile:
    """block_m (token, head) rows by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class SplitPlan:
    """Decode work of one step: the grid's bound and where partial results go."""

    tile: DecodeTile
    wave: int
    max_chunks: int
    part: torch.Tensor
    lse: torch.Tensor
    first_chunk_B: torch.Tensor
    num_chunks_B: torch.Tensor


@dataclass(frozen=True)
class TritonPlan:
    """What the layers of a step share. extend is None for a decode step, split is None where no row needs it."""

    extend: ExtendTile | None
    split: SplitPlan | None


@dataclass(frozen=True)
class Limits:
    """What the choice of tiles asks of a device: multiprocessors, shared memory that one program can have, dependent launch."""

    num_sms: int
    shared_bytes: int
    dependent_launch: bool = False


@lru_cache
def limits_of(device: torch.device) -> Limits:
    """The device's limits; without CUDA (interpreter) those of a small card."""
    if device.type != "cuda":
        return Limits(num_sms=4, shared_bytes=99 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return Limits(
        properties.multi_processor_count, properties.shared_memory_per_block_optin, properties.major >= 9
    )


def choose_decode_tile(problem: AttentionProblem, limits: Limits) -> DecodeTile:
    """Three stages hold two blocks of keys and values in flight, 64 KB in all.

    That fits a card with 99 KB of shared memory, and lets three programs share a multiprocessor of 228 KB.
    """
    row_bytes = padded(problem.head_dim) * problem.dtype.itemsize
    block_n = min(128, max(16, 64 * 1024 // (2 * 2 * row_bytes)))
    if problem.dtype.itemsize > 2:  # fp32 multiplies on CUDA cores: larger blocks spill registers
        block_n = 16
    return DecodeTile(block_n, num_warps=4, num_stages=3, wave_programs=3 * limits.num_sms)


def choose_extend_tile(problem: AttentionProblem, max_rows: int, limits: Limits) -> ExtendTile:
    """Tiles for at most max_rows (token, head) rows a request and group; 16 rows are the least a tensor core takes.

    Larger blocks of keys spill registers where the tensor cores read their operands from registers (all cards but Hopper
    and data-centre Blackwell); those have little shared memory too, so one test tells them apart.
    """
    wide_head = padded(problem.head_dim) > 128
    if problem.dtype.itemsize > 2:  # fp32 multiplies on CUDA cores: small tiles, for registers
        return ExtendTile(16 if wide_head else 32, 16, num_warps=8, num_stages=1)
    block_n = 32 if wide_head else 64
    if max_rows <= 16:
        return ExtendTile(16, block_n, num_warps=4, num_stages=2)
    if wide_head:
        return ExtendTile(64, block_n, num_warps=8, num_stages=2)
    if limits.shared_bytes < 160 * 1024:
        return ExtendTile(128, 32, num_warps=8, num_stages=3)
    return ExtendTile(128, block_n, num_warps=8, num_stages=3)


def max_chunks(batch: AttentionBatch, problem: AttentionProblem, tile: DecodeTile, wave: int) -> int:
    """Upper bound of the chunks that `_split` of the kernels makes, for any lengths the batch may hold later."""
    keys = (
        batch.max_kv_len if problem.window is None else min(batch.max_kv_len, problem.window + tile.block_n)
    )
    total = batch.batch_size * keys
    most = max(wave, min(4 * wave, total // LONG_CHUNK))
    return min(total // tile.block_n, most) + batch.batch_size


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


class Scratch:
    """One growing buffer. An outgrown one is kept: a captured graph may still write there."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, sizes: list[int], device: torch.device) -> list[torch.Tensor]:
        """fp32 tensors of these sizes, 16-byte aligned, from the newest buffer. Their content is undefined."""
        spans = [-(-size // 4) * 4 for size in sizes]
        if not self._buffers or self._buffers[-1].numel() < sum(spans):
            self._buffers.append(torch.empty(sum(spans), dtype=torch.float32, device=device))
        assert self._buffers[-1].device == device, "one backend serves one device"
        parts = torch.split(self._buffers[-1][: sum(spans)], spans)
        return [part[:size] for part, size in zip(parts, sizes)]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


class TritonAttention:
    """`AttentionBackend` on CUDA, and under TRITON_INTERPRET=1 anywhere. One instance serves one device and one stream.

    Pass tiles to override the choice by shape (tuning, tests).
    """

    name = "triton"
    graph_safe = True

    def __init__(self, decode_tile: DecodeTile | None = None, extend_tile: ExtendTile | None = None) -> None:
        self._decode_tile = decode_tile
        self._extend_tile = extend_tile
        self.scratch = Scratch()

    def supports(self, problem: AttentionProblem, device: torch.device) -> str | None:
        if problem.dtype not in DTYPES:
            return f"it computes in float16, bfloat16 and float32, not in {problem.dtype}"
        if problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
        if INTERPRETED:
            if problem.dtype == torch.bfloat16:
                return "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there"
            return None
        if device.type != "cuda":
            return f"its kernels need a CUDA device, not {device.type}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "its kernels need compute capability 8.0 (Ampere) or newer"
        return None

    def plan(self, problem: AttentionProblem, batch: AttentionBatch) -> TritonPlan:
        device = batch.kv_lens_B.device
        reason = self.supports(problem, device)
        if reason is not None:
            raise ValueError(f"attention backend 'triton' cannot serve this model: {reason}")
        if batch.is_decode:
            return TritonPlan(None, self._plan_split(problem, batch, device))
        max_rows = batch.max_q_len * problem.group_size
        extend = self._extend_tile or choose_extend_tile(problem, max_rows, limits_of(device))
        may_be_mixed = batch.batch_size > 1 and batch.max_kv_len > LONG_CHUNK
        return TritonPlan(extend, self._plan_split(problem, batch, device) if may_be_mixed else None)

    def _plan_split(
        self, problem: AttentionProblem, batch: AttentionBatch, device: torch.device
    ) -> SplitPlan:
        tile = self._decode_tile or choose_decode_tile(problem, limits_of(device))
        wave = max(1, tile.wave_programs // problem.num_kv_heads)
        chunks = max_chunks(batch, problem, tile, wave)
        heads = chunks * problem.num_heads
        sizes = [heads * problem.head_dim, heads, batch.batch_size, batch.batch_size]
        part, lse, first, count = self.scratch.take(sizes, device)
        return SplitPlan(tile, wave, chunks, part, lse, first.view(torch.int32), count.view(torch.int32))

    def forward(
        self,
        q_THC: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        plan: TritonPlan,
        problem: AttentionProblem,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert q_THC.stride(2) == 1 and q_THC.dtype == cache.k_PSGC.dtype == problem.dtype
        assert cache.k_PSGC.stride() == cache.v_PSGC.stride() and cache.k_PSGC.stride(3) == 1
        out_THC = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
        if q_THC.shape[0] == 0:  # an empty grid is an error on CUDA
            return out_THC
        if plan.extend is not None:
            launch_extend(out_THC, q_THC, cache, batch, plan, problem, sinks_H)
        if plan.split is not None:
            launch_decode(out_THC, q_THC, cache, batch, plan.split, problem, sinks_H)
            launch_combine(out_THC, batch, plan.split, problem, sinks_H)
        return out_THC


def launch_options(tile: DecodeTile | ExtendTile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch, for kernel and driver alike."""
    return {"PDL": True, "launch_pdl": True} if limits_of(device).dependent_launch else {"PDL": False}


def common_arguments(
    q_THC: torch.Tensor, cache: LayerCache, batch: AttentionBatch, problem: AttentionProblem
) -> dict[str, Any]:
    """What decode and extend kernels share, by name."""
    num_requests = batch.batch_size
    return {
        "q_ptr": q_THC,
        "k_ptr": cache.k_PSGC,
        "v_ptr": cache.v_PSGC,
        "cu_q_ptr": batch.cu_q_B1,
        "kv_lens_ptr": batch.kv_lens_B,
        "table_ptr": batch.page_table_BP,
        "num_requests": num_requests,
        "scale_log2": problem.scale * LOG2E,
        "stride_q_row": q_THC.stride(0),
        "stride_q_head": q_THC.stride(1),
        "stride_page": cache.k_PSGC.stride(0),
        "stride_row": cache.k_PSGC.stride(1),
        "stride_head": cache.k_PSGC.stride(2),
        "stride_table": batch.page_table_BP.stride(0),
        "GROUP": problem.group_size,
        "HEAD_DIM": problem.head_dim,
        "PAGE_SIZE": problem.page_size,
        "WINDOW": problem.window or 0,
        "SOFT_CAP": problem.soft_cap or 0.0,
        "BLOCK_B": next(size for size in BATCH_BLOCKS if size >= num_requests),
        "BLOCK_C": padded(problem.head_dim),
    }


def launch_extend(
    out_THC: torch.Tensor,
    q_THC: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    plan: TritonPlan,
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None,
) -> None:
    tile = plan.extend
    assert tile is not None
    # Every request may end in a tile that is not full; hence one more for each.
    max_tiles = triton.cdiv(q_THC.shape[0] * problem.group_size, tile.block_m) + batch.batch_size
    kernel: Any = extend_kernel  # Triton's launch syntax is beyond type checkers
    kernel[(problem.num_kv_heads, max_tiles)](
        **common_arguments(q_THC, cache, batch, problem),
        out_ptr=out_THC,
        sinks_ptr=q_THC if sinks_H is None else sinks_H,
        HAS_SINKS=sinks_H is not None,
        SKIP_SINGLE=plan.split is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **launch_options(tile),
    )


def launch_decode(
    out_THC: torch.Tensor,
    q_THC: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    split: SplitPlan,
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None,
) -> None:
    kernel: Any = decode_kernel  # Triton's launch syntax is beyond type checkers
    kernel[(problem.num_kv_heads, split.max_chunks)](
        **common_arguments(q_THC, cache, batch, problem),
        out_ptr=out_THC,
        part_ptr=split.part,
        lse_ptr=split.lse,
        first_chunk_ptr=split.first_chunk_B,
        num_chunks_ptr=split.num_chunks_B,
        sinks_ptr=split.part if sinks_H is None else sinks_H,
        wave=split.wave,
        HAS_SINKS=sinks_H is not None,
        BLOCK_H=padded(problem.group_size),
        BLOCK_N=split.tile.block_n,
        **launch_options(split.tile),
        **dependent_launch(q_THC.device),
    )


def launch_combine(
    out_THC: torch.Tensor,
    batch: AttentionBatch,
    split: SplitPlan,
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None,
) -> None:
    kernel: Any = combine_kernel  # Triton's launch syntax is beyond type checkers
    kernel[(batch.batch_size, problem.num_heads)](
        out_THC,
        split.part,
        split.lse,
        split.first_chunk_B,
        split.num_chunks_B,
        batch.cu_q_B1,
        split.part if sinks_H is None else sinks_H,
        HEAD_DIM=problem.head_dim,
        HAS_SINKS=sinks_H is not None,
        BLOCK_C=padded(problem.head_dim),
        BLOCK_S=64 if batch.batch_size <= FEW_REQUESTS else 16,
        **dependent_launch(out_THC.device),
    )
