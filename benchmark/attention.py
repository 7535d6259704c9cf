"""Paged attention on a GPU: decode by batch and context, prefill by length, beside the memory bandwidth of the same run.

    python benchmark/attention.py                      # every case of both shapes, checked, then timed
    python benchmark/attention.py --shape qwen3-30b-a3b --batch 64 --context 4096 --prefill ""
    python benchmark/attention.py --sweep --seconds 60 # tiles, on a few cases; the best go into triton_paged.py by hand

Each case is first compared with the SDPA backend on the same pages. Calls are captured in one CUDA graph and rotate over
disjoint pages, so that the L2 cache holds none of them from the call before. Appends a line a case to
benchmark/results/attention.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention import AttentionBackend, AttentionBatch, AttentionProblem, LayerCache
from minisgl.attention.choice import write_record
from minisgl.attention.flashinfer import FlashInferAttention
from minisgl.attention.torch_sdpa import TorchAttention
from minisgl.attention.triton_paged import (
    DecodeTile,
    ExtendTile,
    TritonAttention,
    choose_decode_tile,
    choose_extend_tile,
    limits_of,
)
from record import append_record, graph_us, hbm_bandwidth

SHAPES = {"qwen3-30b-a3b": (32, 4, 128), "qwen3-0.6b": (16, 8, 128)}  # query heads, key/value heads, head_dim
CUDA = torch.device("cuda")
ROTATED_BYTES = 512 * 2**20  # ten times the L2 cache of an H200
MAX_ROTATIONS = 64
MAX_CALLS_A_GRAPH = 64
PEERS = {"torch (dense)": "torch_dense_us", "flashinfer": "flashinfer_us"}
TOLERANCE = 4e-2  # bf16 outputs of unit variance: two roundings


@dataclass(frozen=True)
class Work:
    """Requests of one case, all alike: q_len new rows behind kv_len - q_len earlier ones."""

    batch: int
    q_len: int
    kv_len: int

    @property
    def name(self) -> str:
        kind = "decode" if self.q_len == 1 else "prefill"
        return f"{kind} batch {self.batch} context {self.kv_len}"

    def num_bytes(self, problem: AttentionProblem) -> int:
        """Keys and values once, queries and outputs once."""
        rows = 2 * self.kv_len * problem.num_kv_heads + 2 * self.q_len * problem.num_heads
        return self.batch * rows * problem.head_dim * problem.dtype.itemsize

    def flops(self, problem: AttentionProblem) -> float:
        """Two products over the (row, key) pairs below the causal diagonal."""
        pairs = self.q_len * (self.kv_len - self.q_len) + self.q_len * (self.q_len + 1) / 2
        return self.batch * 4 * pairs * problem.num_heads * problem.head_dim


class Pool:
    """Keys and values on pages that every case of one shape shares, handed out in shuffled order."""

    def __init__(self, problem: AttentionProblem, max_tokens: int) -> None:
        self.problem = problem
        self.num_pages = 1 + -(-max_tokens // problem.page_size)
        shape = (self.num_pages, problem.page_size, problem.num_kv_heads, problem.head_dim)
        k_PSGC, v_PSGC = (torch.empty(shape, dtype=problem.dtype, device=CUDA).normal_() for _ in range(2))
        self.cache = LayerCache(k_PSGC, v_PSGC)

    def batches(self, work: Work) -> list[AttentionBatch]:
        """As many batches on disjoint pages as it takes to flush the L2 cache, or as fit."""
        pages = -(-work.kv_len // self.problem.page_size)
        wanted = -(-ROTATED_BYTES // work.num_bytes(self.problem))
        count = max(1, min(wanted, MAX_ROTATIONS, (self.num_pages - 1) // (pages * work.batch)))
        order = 1 + torch.randperm(self.num_pages - 1, device=CUDA, dtype=torch.int32)
        tables = order[: count * work.batch * pages].view(count, work.batch, pages)
        cu_q_B1 = torch.arange(work.batch + 1, dtype=torch.int32, device=CUDA) * work.q_len
        kv_lens_B = torch.full((work.batch,), work.kv_len, dtype=torch.int32, device=CUDA)
        slots_T = torch.zeros(
            work.batch * work.q_len, dtype=torch.int64, device=CUDA
        )  # nothing is written here
        return [
            AttentionBatch(cu_q_B1, kv_lens_B, table, slots_T, work.q_len, work.kv_len) for table in tables
        ]

    def queries(self, work: Work) -> torch.Tensor:
        shape = (work.batch * work.q_len, self.problem.num_heads, self.problem.head_dim)
        return torch.randn(shape, dtype=self.problem.dtype, device=CUDA)


def backend_calls(
    backend: AttentionBackend, pool: Pool, work: Work, batches: list[AttentionBatch], q_THC: torch.Tensor
) -> list[Callable[[], torch.Tensor]]:
    calls = []
    for batch in batches:
        plan = backend.plan(pool.problem, batch)
        calls.append(
            lambda batch=batch, plan=plan: backend.forward(q_THC, pool.cache, batch, plan, pool.problem)
        )
    few = len(calls) < 8 and work.q_len == 1
    return calls * (8 // len(calls)) if few else calls[:MAX_CALLS_A_GRAPH]


def check(backend: AttentionBackend, pool: Pool, batch: AttentionBatch, q_THC: torch.Tensor) -> float:
    """Largest difference from the SDPA backend; raises if it is above the tolerance."""
    outputs = []
    for candidate in (backend, TorchAttention()):
        plan = candidate.plan(pool.problem, batch)
        outputs.append(candidate.forward(q_THC, pool.cache, batch, plan, pool.problem).float())
    error = float((outputs[0] - outputs[1]).abs().max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"wrong result: {backend.name} differs from sdpa by {error}")
    return error


def dense_torch_us(pool: Pool, work: Work) -> float | None:
    """PyTorch's own fused attention on contiguous keys and values of the same sizes: a peer without pages.

    None where it would not fit, or where its causal mask means another thing (rows behind a prefix).
    """
    problem = pool.problem
    if work.q_len not in (1, work.kv_len) or 2 * work.num_bytes(problem) > torch.cuda.mem_get_info()[0]:
        return None
    shape = (work.batch, work.kv_len, problem.num_kv_heads, problem.head_dim)
    count = max(1, min(8, ROTATED_BYTES // work.num_bytes(problem)))
    q = pool.queries(work).view(work.batch, work.q_len, problem.num_heads, -1).transpose(1, 2)
    pairs = [
        [torch.randn(shape, dtype=problem.dtype, device=CUDA).transpose(1, 2) for _ in range(2)]
        for _ in range(count)
    ]
    options = {"is_causal": work.q_len > 1, "scale": problem.scale, "enable_gqa": True}
    calls = [lambda k=k, v=v: scaled_dot_product_attention(q, k, v, **options) for k, v in pairs]
    return graph_us(calls).median


def flashinfer_us(
    pool: Pool, work: Work, batches: list[AttentionBatch], q_THC: torch.Tensor, kernels: str
) -> float | None:
    """FlashInfer on the same pages, one planned wrapper a batch; None where it is not installed or fails, which is printed."""
    if FlashInferAttention(kernels).supports(pool.problem, CUDA) is not None:
        return None
    try:
        check(FlashInferAttention(kernels), pool, batches[0], q_THC)
        calls = [
            backend_calls(FlashInferAttention(kernels), pool, work, [batch], q_THC)[0]
            for batch in batches[:16]
        ]
        return graph_us(calls).median
    except (
        Exception
    ) as error:  # its kernels compile at their first call, which needs a toolchain that may be absent
        print(f"flashinfer ({kernels}): {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def measure(pool: Pool, work: Work, bandwidth: float, shape: str, peer: str | None) -> dict[str, Any]:
    """Check and time one case; what is worth a record. peer: FlashInfer's kernels to compare with, None for no peers."""
    problem, backend = pool.problem, TritonAttention()
    batches, q_THC = pool.batches(work), pool.queries(work)
    error = check(backend, pool, batches[0], q_THC)
    median, low, high = graph_us(backend_calls(backend, pool, work, batches, q_THC))
    dense = None if peer is None else dense_torch_us(pool, work)
    paged = None if peer is None else flashinfer_us(pool, work, batches, q_THC, peer)
    limits = limits_of(CUDA)
    rows = work.q_len * problem.group_size
    tile = (
        choose_decode_tile(problem, limits) if work.q_len == 1 else choose_extend_tile(problem, rows, limits)
    )
    return {
        "kernel": "triton_paged",
        "shape": shape,
        "case": work.name,
        "page_size": problem.page_size,
        "tile": dataclasses.asdict(tile),
        "us": round(median, 2),
        "us_p10": round(low, 2),
        "us_p90": round(high, 2),
        "bytes": work.num_bytes(problem),
        "bandwidth_percent": round(100 * work.num_bytes(problem) / (median * 1e-6) / bandwidth, 1),
        "tflops": round(work.flops(problem) / median / 1e6, 1),
        "torch_dense_us": None if dense is None else round(dense, 2),
        "flashinfer_us": None if paged is None else round(paged, 2),
        "max_error": error,
        "rotations": len(batches),
    }


def row(record: dict[str, Any]) -> str:
    """One line of the table."""
    peers = [f"{name} {record[key]:.1f} us" for name, key in PEERS.items() if record[key] is not None]
    return (
        f"{record['shape']:14} {record['case']:32} {record['us']:9.1f} us  {record['bandwidth_percent']:5.1f} % HBM  "
        f"{record['tflops']:6.1f} TFLOP/s  {', '.join(peers)}"
    )


def entry_of(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """What `auto` chooses by: both backends' times of the same prompts, added up."""
    return {
        "case": f"{prompts[0]['shape']}: " + ", ".join(record["case"] for record in prompts),
        "triton_us": round(sum(record["us"] for record in prompts), 1),
        "flashinfer_us": round(sum(record["flashinfer_us"] for record in prompts), 1),
    }


def decode_tiles(problem: AttentionProblem) -> Iterator[DecodeTile]:
    """The default first, then one change at a time, then pairs of changes."""
    base = choose_decode_tile(problem, limits_of(CUDA))
    sms = limits_of(CUDA).num_sms
    choices = {
        "block_n": (32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4),
        "wave_programs": (sms, 2 * sms, 3 * sms, 4 * sms, 6 * sms),
    }
    yield from variations(base, choices)


def extend_tiles(problem: AttentionProblem, rows: int) -> Iterator[ExtendTile]:
    base = choose_extend_tile(problem, rows, limits_of(CUDA))
    yield base
    for m, n, warps, stages in (
        (64, 64, 4, 3),
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (256, 64, 16, 2),
        (256, 32, 16, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 4),
        (64, 128, 4, 2),
        (256, 32, 8, 3),
        (128, 128, 8, 3),
        (128, 64, 4, 2),
        (128, 32, 8, 3),
    ):
        yield ExtendTile(m, n, warps, stages)


def variations(base: Any, choices: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    """base, then every tile that differs from it in one field, then in two."""
    yield base
    for count in (1, 2):
        for names in itertools.combinations(choices, count):
            for values in itertools.product(*(choices[name] for name in names)):
                if all(value != getattr(base, name) for name, value in zip(names, values)):
                    yield dataclasses.replace(base, **dict(zip(names, values)))


def compile_tiles(problem: AttentionProblem, works: list[Work], tiles: list[Any]) -> None:
    """What a worker of `compile_ahead` does: one forward a tile and work, on a pool that holds next to nothing."""
    for work in works:
        small = Work(work.batch, min(work.q_len, 64), min(work.kv_len, 64))
        pool = Pool(problem, small.batch * small.kv_len)
        batch, q_THC = pool.batches(small)[0], pool.queries(small)
        for tile in tiles:
            decode, extend = (tile, None) if isinstance(tile, DecodeTile) else (None, tile)
            backend = TritonAttention(decode, extend)
            with contextlib.suppress(Exception):  # the same error will show where the tile is timed
                backend.forward(q_THC, pool.cache, batch, backend.plan(problem, batch), problem)


def compile_ahead(problem: AttentionProblem, works: list[Work], tiles: list[Any], seconds: float) -> None:
    """Fill Triton's cache on disk from several processes, for at most so long: a tile takes seconds to compile."""
    workers = min(12, os.cpu_count() or 1)
    batches = list({work.batch: work for work in works}.values())
    context, deadline = get_context("spawn"), time.monotonic() + seconds
    processes = [
        context.Process(target=compile_tiles, args=(problem, batches, tiles[n::workers]), daemon=True)
        for n in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()


def sweep(pool: Pool, works: list[Work], seconds: float, shape: str) -> None:
    """Time tiles on all works of one kind, breadth first, until the time is up; print and record the ten best by total."""
    problem, started, found = pool.problem, time.monotonic(), []
    decode = works[0].q_len == 1
    prepared = [(work, pool.batches(work), pool.queries(work)) for work in works]
    rows = max(work.q_len for work in works) * problem.group_size
    tiles = list(decode_tiles(problem) if decode else extend_tiles(problem, rows))
    compile_ahead(problem, works, tiles, seconds / 2)
    for tile in tiles:
        if time.monotonic() - started > seconds:
            print(f"time is up after {len(found)} tiles")
            break
        backend = TritonAttention(decode_tile=tile) if decode else TritonAttention(extend_tile=tile)
        try:
            times = []
            for work, batches, q_THC in prepared:
                check(backend, pool, batches[0], q_THC)
                calls = backend_calls(backend, pool, work, batches, q_THC)
                times.append(round(graph_us(calls, repeats=7).median, 2))
        except Exception as error:  # Triton raises its own types when a tile needs more than the device has
            print(f"{tile}: {type(error).__name__}: {str(error)[:80]}")
            continue
        found.append((tile, times))
        print(f"{tile}: {times}", flush=True)
    base = found[0][1]
    found.sort(key=lambda entry: sum(us / reference for us, reference in zip(entry[1], base)))
    print(f"best for {[work.name for work in works]}, us:")
    for tile, times in found[:10]:
        print(f"  {tile}: {times}")
        cases = {work.name: us for work, us in zip(works, times)}
        append_record("attention_sweep", {"shape": shape, "tile": dataclasses.asdict(tile), "us": cases})


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=",".join(SHAPES), help="comma-separated, of: %(default)s")
    parser.add_argument("--batch", type=numbers, default="1,8,64,256")
    parser.add_argument("--context", type=numbers, default="1024,4096,16384")
    parser.add_argument("--prefill", type=numbers, default="2048,8192", help='prompt lengths; "" for none')
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--flashinfer", default="auto", help="its kernels: auto, fa2 or fa3")
    parser.add_argument("--write-record", action="store_true", help="let auto choose by this run's prompts")
    parser.add_argument("--no-peer", action="store_true", help="time this backend alone")
    parser.add_argument(
        "--sweep", action="store_true", help="try tiles instead of measuring the default ones"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="time limit of a sweep, decode and prefill each"
    )
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args()
    unknown = set(options.shape.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"unknown shape {', '.join(sorted(unknown))}: use {', '.join(SHAPES)}")
    return options


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    bandwidth = hbm_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s (read and written bytes counted)",
        flush=True,
    )
    for shape in options.shape.split(","):
        heads, kv_heads, head_dim = SHAPES[shape]
        problem = AttentionProblem(
            heads, kv_heads, head_dim, options.page_size, torch.bfloat16, head_dim**-0.5
        )
        decodes = [Work(b, 1, n) for b in options.batch for n in options.context]
        prefills = [Work(1, n, n) for n in options.prefill]
        rotated = ROTATED_BYTES // (2 * kv_heads * head_dim * 2)
        pool = Pool(problem, max([rotated, *(work.batch * work.kv_len for work in decodes + prefills)]))
        if options.sweep:
            for works in (decodes, prefills):
                if works:
                    sweep(pool, works, options.seconds, shape)
            continue
        prompts = []
        for work in decodes + prefills:
            peer = None if options.no_peer else options.flashinfer
            record = measure(pool, work, bandwidth, shape, peer)
            append_record("attention", record)
            print(json.dumps(record) if options.json else row(record), flush=True)
            if work.q_len > 1 and record["flashinfer_us"] is not None:
                prompts.append(record)
        if options.write_record and prompts:
            write_record(torch.cuda.get_device_name(), entry_of(prompts))
        del pool


if __name__ == "__main__":
    main()
