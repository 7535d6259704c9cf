"""Measured choices: candidates, timing, and records on disk.

A record is keyed by GPU, Triton version and problem, and holds one choice for each power-of-two bucket of
tokens. The two GEMMs are independent once BLOCK_M is fixed, so their tiles are measured apart and the best of
each is combined, for every BLOCK_M that makes sense; whole steps decide between those and direct, which has
to win by 5 % because it reads weights once a route and so suffers more from an unlucky routing.

Timing never happens in a forward pass that a graph captures: see `Tuner.wants`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton

from minisgl.moe.base import Placement, Problem
from minisgl.moe.kernels import launch, launch_direct
from minisgl.moe.select import (
    PACKED_FORMATS,
    Choice,
    DeviceLimits,
    Record,
    Tiles,
    grouped_block_m,
)
from minisgl.moe.workspace import (
    DIRECT_MAX_TOKENS,
    FP8_FORMATS,
    Workspace,
    largest_block_m,
    next_power_of_two,
)

DIRECT_MARGIN = 0.95
FLUSH_BYTES = 256 << 20  # larger than any L2, so that every timing starts from memory
BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4, "int4": 0.5, "mxfp4": 0.5}


def problem_key(problem: Problem) -> str:
    """One line that names a problem without its number of tokens."""
    shape = problem.shape
    bias = ",bias" if shape.bias else ""
    return (
        f"S{problem.num_slots},K{problem.top_k},D{shape.model_dim},F{shape.hidden_dim}{bias},"
        f"{problem.format},g{problem.group_size},{str(problem.dtype).removeprefix('torch.')},{problem.activation}"
    )


# ---------------------------------------------------------------------------------------------- candidates


def grouped_shared_bytes(problem: Problem, tiles: Tiles, block_m: int, halves: int) -> int:
    """Shared memory of the pipelined operands; halves is 2 for gate_up (gate and up), 1 for down."""
    weight = BYTES_PER_WEIGHT.get(problem.format, 1)
    x = 1 if problem.format in FP8_FORMATS else problem.dtype.itemsize
    rows = halves * tiles.block_n
    stage = tiles.block_k * (block_m * x + rows * weight)
    in_registers = (
        weight == x or tiles.swap or block_m < 64
    )  # else converted weights go back to shared memory
    return int(stage * tiles.num_stages + (0 if in_registers else rows * tiles.block_k * x))


def _block_ks(problem: Problem, size: int) -> list[int]:
    widths = [128] if problem.format == "fp8_block" else [64, 128, 256]
    return [width for width in widths if size % width == 0] or [64 if size >= 64 else 32]


def grouped_tiles(problem: Problem, limits: DeviceLimits, block_m: int, gemm: str) -> Iterator[Tiles]:
    """Candidates for one GEMM: enough bytes in flight to hide memory, few enough registers not to spill."""
    size = problem.shape.model_dim if gemm == "gate_up" else problem.shape.hidden_dim
    halves = 2 if gemm == "gate_up" else 1
    small, tma = block_m <= 32, limits.capability >= (9, 0)
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
    """Candidates of the direct kernels, on the ordinary cores and (formats that need converting) on the tensor cores."""
    if problem.format in (*PACKED_FORMATS, "int8"):
        yield from _wide_tiles(problem, limits, gemm)
    if problem.format not in PACKED_FORMATS:
        yield from _plain_direct_tiles(problem, gemm)


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
                    if limits.capability >= (9, 0):
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


def block_m_candidates(problem: Problem) -> list[int]:
    """The heuristic's BLOCK_M and its neighbours."""
    centre = grouped_block_m(problem)
    largest = largest_block_m(problem.num_tokens)
    return sorted({min(max(block, 16), largest) for block in (centre // 2, centre, centre * 2)})


def spread(tiles: Iterator[Tiles], most: int) -> list[Tiles]:
    """At most `most` of the candidates: a sample, the same at every call. (Every n-th would fall into step with the
    loops that made them, and leave out all of one kind.)"""
    every = list(tiles)
    return every if len(every) <= most else random.Random(0).sample(every, most)


def candidates(
    problem: Problem, limits: DeviceLimits, most: int = 32
) -> list[tuple[str, int, list[Tiles], list[Tiles]]]:
    """(kernel, block_m, tiles of gate_up, tiles of down) to measure, at most `most` tiles of each."""
    found = []
    if problem.num_tokens <= min(16, DIRECT_MAX_TOKENS):
        ups, downs = (spread(direct_tiles(problem, limits, gemm), most) for gemm in ("gate_up", "down"))
        found.append(("direct", 1, ups, downs))
    for block_m in block_m_candidates(problem):
        ups, downs = (
            spread(grouped_tiles(problem, limits, block_m, gemm), most) for gemm in ("gate_up", "down")
        )
        if ups and downs:
            found.append(("grouped", block_m, ups, downs))
    return found


# -------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Timing:
    """One measured thing: microseconds, median; error where it could not run (its reason)."""

    tiles: Tiles
    microseconds: float
    error: str = ""


class Stopwatch:
    """Median time of something captured in a CUDA graph, from a cold L2."""

    def __init__(self, device: torch.device, repeats: int = 7) -> None:
        self.repeats = repeats
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=device)

    def time(self, call: Callable[[], object]) -> float:
        call()  # compiles and loads, which can't happen while capturing
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.amax()  # read, not written: dirty lines would be written back while we measure
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)


@dataclass(frozen=True)
class TuningCase:
    """Real data to tune on: the rows, the slab and the slots of one step's wave."""

    problem: Problem
    x_TD: torch.Tensor
    placement: Placement
    weights_TK: torch.Tensor


class Tuner:
    """Measures candidates for a case and keeps what won in `records`."""

    def __init__(
        self,
        limits: DeviceLimits,
        records: Records,
        log: Callable[[str], None] | None = None,
        most: int = 32,
    ) -> None:
        self.limits, self.records, self.most = limits, records, most
        self.log = log or (lambda line: None)

    def wants(self, problem: Problem, slots_TK: torch.Tensor) -> bool:
        """Whether this bucket has not been measured yet, and may be: never while a graph is being captured."""
        if not slots_TK.is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        bucket = next_power_of_two(problem.num_tokens)
        return bucket not in (self.records.lookup(problem, self.limits) or {})

    def tune(self, case: TuningCase) -> Choice:
        """The fastest choice for the case, now also in the records."""
        watch = Stopwatch(case.x_TD.device)
        workspace = Workspace(case.x_TD.device)
        best: dict[str, tuple[float, Choice]] = {}
        for kernel, block_m, ups, downs in candidates(case.problem, self.limits, self.most):
            choice = self._best_tiles(case, watch, workspace, kernel, block_m, ups, downs)
            if choice is None:
                continue
            whole = watch.time(lambda choice=choice: run_step(case, choice, workspace))
            self.log(f"{problem_key(case.problem)} T={case.problem.num_tokens} {whole:.1f} us {choice}")
            if kernel not in best or whole < best[kernel][0]:
                best[kernel] = (whole, choice)
        if not best:
            raise RuntimeError(f"no candidate runs on this device for {problem_key(case.problem)}")
        if "direct" in best and "grouped" in best:
            direct_wins = best["direct"][0] < DIRECT_MARGIN * best["grouped"][0]
            microseconds, choice = best["direct" if direct_wins else "grouped"]
        else:
            microseconds, choice = next(iter(best.values()))
        self.records.add(case.problem, self.limits, choice, microseconds)
        return choice

    def _best_tiles(self, case, watch, workspace, kernel, block_m, ups, downs) -> Choice | None:
        fastest = []
        for gemm, tiles in (("gate_up", ups), ("down", downs)):
            timings = [self._measure(case, watch, workspace, kernel, block_m, gemm, one) for one in tiles]
            working = [timing for timing in timings if not timing.error]
            for timing in sorted(timings, key=lambda timing: timing.microseconds):
                self.log(
                    f"  {kernel} BM{block_m} {gemm} {timing.microseconds:8.1f} {timing.tiles} {timing.error}"
                )
            if not working:
                return None
            fastest.append(min(working, key=lambda timing: timing.microseconds).tiles)
        return Choice(kernel, block_m, *fastest)

    def _measure(self, case, watch, workspace, kernel, block_m, gemm, tiles) -> Timing:
        choice = Choice(kernel, block_m, tiles, tiles)
        try:
            prepare(case, choice, workspace)
            return Timing(tiles, watch.time(lambda: run_gemm(case, choice, workspace, gemm)))
        except (
            Exception
        ) as error:  # too much shared memory for this device, or no compilation: not a candidate
            torch.cuda.synchronize()
            return Timing(tiles, float("inf"), f"{type(error).__name__}: {error}"[:100])


def prepare(case: TuningCase, choice: Choice, workspace: Workspace) -> None:
    """What must have run before a single GEMM: alignment, which also makes the rows of x ready."""
    if choice.kernel == "grouped":
        buffers = workspace.claim(case.problem)
        slots_TK, num_slots = case.placement.slots_TK, case.placement.slab.num_slots
        launch.align(case.x_TD, slots_TK, num_slots, case.problem, choice.block_m, True, buffers)


def run_gemm(case: TuningCase, choice: Choice, workspace: Workspace, gemm: str) -> None:
    problem, slab, buffers = case.problem, case.placement.slab, workspace.claim(case.problem)
    num_routes, model_dim = problem.num_tokens * problem.top_k, problem.shape.model_dim
    if choice.kernel == "direct" and gemm == "gate_up":
        launch_direct.direct_gate_up(case.x_TD, case.placement, problem, choice.gate_up, True, buffers)
    elif choice.kernel == "direct" and choice.down.wide:
        rows_RD = buffers.rows_RD(num_routes, model_dim, torch.float32)
        launch_direct.wide_down(rows_RD, case.placement, problem, choice.down, buffers)
        launch.reduce(rows_RD, case.weights_TK, buffers, torch.empty_like(case.x_TD))
    elif choice.kernel == "direct":
        y_TD = torch.empty_like(case.x_TD)
        launch_direct.direct_down(y_TD, case.placement, case.weights_TK, problem, choice.down, buffers, True)
    elif gemm == "gate_up":
        launch.gate_up(case.x_TD, slab, problem, choice, num_routes, buffers)
    else:
        rows_RD = buffers.rows_RD(num_routes, model_dim, problem.dtype)
        launch.down(rows_RD, slab, problem, choice, num_routes, buffers)


def run_step(case: TuningCase, choice: Choice, workspace: Workspace) -> None:
    """All kernels of a step in their order."""
    problem, buffers = case.problem, workspace.claim(case.problem)
    num_routes = problem.num_tokens * problem.top_k
    prepare(case, choice, workspace)
    run_gemm(case, choice, workspace, "gate_up")
    codes = problem.format in FP8_FORMATS and not launch.codes_in_down(problem, choice.block_m, case.x_TD)
    if choice.kernel == "grouped" and codes:
        launch.quantize_activated(problem, choice.block_m, num_routes, buffers)
    run_gemm(case, choice, workspace, "down")
    if choice.kernel == "grouped":
        rows_RD = buffers.rows_RD(num_routes, problem.shape.model_dim, problem.dtype)
        launch.reduce(rows_RD, case.weights_TK, buffers, torch.empty_like(case.x_TD))


# ------------------------------------------------------------------------------------------------- records


class Records:
    """Measured choices by GPU and problem: those shipped with the package, and a folder of one's own.

    A file holds one GPU and one Triton version. Records of the running version win over those of others.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._entries: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}

    @staticmethod
    def default_folder() -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "minisgl" / "moe"

    def lookup(self, problem: Problem, limits: DeviceLimits) -> Record | None:
        """Bucket -> choice, or None if nothing was measured; what exceeds the device's shared memory is left out."""
        buckets = self._of_gpu(limits.name).get(problem_key(problem))
        if not buckets:
            return None
        return {bucket: choice_from_json(entry["choice"]) for bucket, entry in buckets.items()}

    def add(self, problem: Problem, limits: DeviceLimits, choice: Choice, microseconds: float) -> None:
        buckets = self._of_gpu(limits.name).setdefault(problem_key(problem), {})
        entry = {"choice": asdict(choice), "us": round(microseconds, 2), "triton": triton.__version__}
        buckets[next_power_of_two(problem.num_tokens)] = entry
        if self.folder is not None:
            self.save(self.folder, limits.name)

    def save(self, folder: Path, gpu: str) -> Path:
        """Write this GPU's entries that were measured with the running Triton."""
        mine = {}
        for key, buckets in sorted(self._of_gpu(gpu).items()):
            kept = {str(b): e for b, e in sorted(buckets.items()) if e["triton"] == triton.__version__}
            if kept:
                mine[key] = kept
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_stem(gpu)}.triton-{triton.__version__}.json"
        content = {"gpu": gpu, "triton": triton.__version__, "problems": mine}
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def _of_gpu(self, gpu: str) -> dict[str, dict[int, dict[str, Any]]]:
        if gpu not in self._entries:
            entries: dict[str, dict[int, dict[str, Any]]] = {}
            for content in sorted(self._files(gpu), key=lambda c: c["triton"] == triton.__version__):
                for key, buckets in content["problems"].items():
                    entries.setdefault(key, {}).update({int(b): entry for b, entry in buckets.items()})
            self._entries[gpu] = entries
        return self._entries[gpu]

    def _files(self, gpu: str) -> Iterator[dict[str, Any]]:
        shipped = resources.files("minisgl.moe") / "tuned"
        folders = [shipped, *([self.folder] if self.folder is not None and self.folder.is_dir() else [])]
        for folder in folders:
            for file in folder.iterdir() if folder.is_dir() else ():
                if file.name.startswith(file_stem(gpu) + ".triton-") and file.name.endswith(".json"):
                    yield json.loads(file.read_text())


def file_stem(gpu: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in gpu)


def choice_from_json(content: dict[str, Any]) -> Choice:
    tiles = {gemm: Tiles(**content[gemm]) for gemm in ("gate_up", "down")}
    return Choice(content["kernel"], content["block_m"], **tiles)
