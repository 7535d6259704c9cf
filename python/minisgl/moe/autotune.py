"""Measuring choices on real data.

The two GEMMs are independent once BLOCK_M is fixed, so their tiles are measured apart and the best of each is
combined, for every BLOCK_M that makes sense; whole steps decide between those and direct, which has to win by
5 % because it reads weights once a route and so suffers more from an unlucky routing. Kernels that do both GEMMs in one launch
are measured as whole steps only.

Timing never happens in a forward pass that a graph captures: see `Tuner.wants`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from minisgl.moe.base import Placement, Problem
from minisgl.moe.candidates import candidates, neighbours, persistent_choices
from minisgl.moe.kernels import launch, launch_direct, launch_few_rows, launch_persistent
from minisgl.moe.records import Records, problem_key
from minisgl.moe.select import Choice, DeviceLimits, Kernel, Tiles
from minisgl.moe.workspace import FP8_FORMATS, Workspace, next_power_of_two

DIRECT_MARGIN = 0.95
REFINED = 3  # the fastest tiles whose neighbours are tried
FLUSH_BYTES = 256 << 20  # larger than any L2, so that every timing starts from memory


@dataclass(frozen=True)
class Timing:
    """One measured thing: microseconds, median; infinite, with the reason, where it could not run."""

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
    """Measures candidates for a case and keeps what won in `records`.

    most: tiles measured a GEMM and BLOCK_M before the refinement. compile_ahead: given choices about to be measured,
    fills Triton's cache on disk, e.g. in parallel (`kernels.precompile.CompilePool`); None compiles one by one.
    """

    def __init__(
        self,
        limits: DeviceLimits,
        records: Records,
        *,
        most: int = 32,
        compile_ahead: Callable[[Problem, Sequence[Choice]], None] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.limits, self.records, self.most = limits, records, most
        self.compile_ahead, self.log = compile_ahead, log or (lambda line: None)

    def wants(self, problem: Problem, slots_TK: torch.Tensor) -> bool:
        """Whether this bucket has not been measured yet, and may be: never while a graph is being captured."""
        if not slots_TK.is_cuda or slots_TK.numel() == 0 or torch.cuda.is_current_stream_capturing():
            return False
        bucket = next_power_of_two(problem.num_tokens)
        return bucket not in (self.records.lookup(problem, self.limits) or {})

    def tune(self, case: TuningCase) -> Choice:
        """The fastest choice for the case, now also in the records. Raises RuntimeError if nothing runs."""
        search = _Search(self, case)
        best: dict[str, tuple[float, Choice]] = {}
        for choice in self._whole_choices(case.problem, search):
            whole = search.whole_step(choice)
            self.log(f"{problem_key(case.problem)} T={case.problem.num_tokens} {whole:.1f} us {choice}")
            if whole < best.get(choice.kernel, (math.inf,))[0]:
                best[choice.kernel] = (whole, choice)
        if not best:
            raise RuntimeError(f"no candidate runs on this device for {problem_key(case.problem)}")
        shared = [found for kernel, found in best.items() if kernel != "direct"]
        microseconds, choice = min(shared, key=lambda found: found[0]) if shared else best["direct"]
        if "direct" in best and best["direct"][0] < DIRECT_MARGIN * microseconds:
            microseconds, choice = best["direct"]
        self.records.add(case.problem, self.limits, choice, microseconds)
        return choice

    def _whole_choices(self, problem: Problem, search: _Search) -> Iterator[Choice]:
        """What is measured as whole steps: every candidate of the kernel for both GEMMs, and the best tiles of the others."""
        persistent = persistent_choices(problem, self.limits)
        if persistent and self.compile_ahead is not None:
            self.compile_ahead(problem, persistent)
        yield from persistent
        for kernel, block_m, ups, downs in candidates(problem, self.limits, self.most):
            choice = search.best_tiles(kernel, block_m, ups, downs)
            if choice is not None:
                yield choice


class _Search:
    """The measurements of one `tune`: a stopwatch, and a workspace of its own, since a step may be in flight."""

    def __init__(self, tuner: Tuner, case: TuningCase) -> None:
        self.tuner, self.case = tuner, case
        self.watch, self.workspace = Stopwatch(case.x_TD.device), Workspace(case.x_TD.device)

    def whole_step(self, choice: Choice) -> float:
        """Microseconds; infinite where it can't run."""
        try:
            return self.watch.time(lambda: run_step(self.case, choice, self.workspace))
        except Exception as error:  # as in `_measure`
            torch.cuda.synchronize()
            self.tuner.log(f"  {choice.kernel} BM{choice.block_m} {type(error).__name__}: {error}"[:140])
            return math.inf

    def best_tiles(self, kernel: Kernel, block_m: int, ups: list[Tiles], downs: list[Tiles]) -> Choice | None:
        measured: dict[str, dict[Tiles, Timing]] = {"gate_up": {}, "down": {}}
        self._measure_all(kernel, block_m, {"gate_up": ups, "down": downs}, measured)
        if not all(_fastest(found, 1) for found in measured.values()):
            return None
        around = {
            gemm: [
                tiles
                for winner in _fastest(found, REFINED)
                for tiles in neighbours(self.case.problem, self.tuner.limits, kernel, block_m, gemm, winner)
            ]
            for gemm, found in measured.items()
        }
        self._measure_all(kernel, block_m, around, measured)
        self._log(kernel, block_m, measured)
        return Choice(kernel, block_m, *(_fastest(measured[gemm], 1)[0] for gemm in ("gate_up", "down")))

    def _measure_all(
        self,
        kernel: Kernel,
        block_m: int,
        wanted: dict[str, list[Tiles]],
        measured: dict[str, dict[Tiles, Timing]],
    ) -> None:
        new = {gemm: [t for t in dict.fromkeys(ts) if t not in measured[gemm]] for gemm, ts in wanted.items()}
        if self.tuner.compile_ahead is not None and any(new.values()):
            first = {gemm: (tiles or list(measured[gemm]))[0] for gemm, tiles in new.items()}
            pairs = zip_longest(new["gate_up"], new["down"])
            choices = [Choice(kernel, block_m, u or first["gate_up"], d or first["down"]) for u, d in pairs]
            self.tuner.compile_ahead(self.case.problem, choices)
        for gemm, tiles in new.items():
            for one in tiles:
                measured[gemm][one] = self._measure(kernel, block_m, gemm, one)

    def _measure(self, kernel: Kernel, block_m: int, gemm: str, tiles: Tiles) -> Timing:
        choice = Choice(kernel, block_m, tiles, tiles)
        try:
            prepare(self.case, choice, self.workspace)
            return Timing(tiles, self.watch.time(lambda: run_gemm(self.case, choice, self.workspace, gemm)))
        except (
            Exception
        ) as error:  # too much shared memory for this device, or no compilation: not a candidate
            torch.cuda.synchronize()
            return Timing(tiles, float("inf"), f"{type(error).__name__}: {error}"[:100])

    def _log(self, kernel: Kernel, block_m: int, measured: dict[str, dict[Tiles, Timing]]) -> None:
        for gemm, found in measured.items():
            for timing in sorted(found.values(), key=lambda one: one.microseconds):
                line = f"{timing.microseconds:8.1f} {timing.tiles} {timing.error}"
                self.tuner.log(f"  {kernel} BM{block_m} {gemm} {line}")


def _fastest(found: dict[Tiles, Timing], count: int) -> list[Tiles]:
    working = [timing for timing in found.values() if not timing.error]
    return [timing.tiles for timing in sorted(working, key=lambda one: one.microseconds)[:count]]


def prepare(case: TuningCase, choice: Choice, workspace: Workspace) -> None:
    """What must have run before a single GEMM: alignment, which also makes the rows of x ready."""
    if choice.kernel != "direct":
        buffers = workspace.claim(case.problem)
        slots_TK, num_slots = case.placement.slots_TK, case.placement.slab.num_slots
        launch.align(
            case.x_TD,
            slots_TK,
            num_slots,
            case.problem,
            choice.block_m,
            True,
            buffers,
            launch.sum_units(case.problem, choice),
        )


def run_gemm(case: TuningCase, choice: Choice, workspace: Workspace, gemm: str) -> None:
    """One GEMM of a step; down of the direct kernels with the sum over k that belongs to it."""
    problem, slab, buffers = case.problem, case.placement.slab, workspace.claim(case.problem)
    num_routes, model_dim = problem.num_tokens * problem.top_k, problem.shape.model_dim
    gemms = launch_few_rows if choice.kernel == "few_rows" else launch
    if choice.kernel == "direct" and gemm == "gate_up":
        launch_direct.direct_gate_up(case.x_TD, case.placement, problem, choice, True, buffers)
    elif choice.kernel == "direct" and choice.down.wide:
        rows_RD = buffers.rows_RD(num_routes, model_dim, torch.float32)
        launch_direct.wide_down(rows_RD, case.placement, problem, choice.down, buffers)
        launch.reduce(rows_RD, case.weights_TK, buffers, torch.empty_like(case.x_TD))
    elif choice.kernel == "direct":
        y_TD = torch.empty_like(case.x_TD)
        launch_direct.direct_down(y_TD, case.placement, case.weights_TK, problem, choice, buffers, True)
    elif gemm == "gate_up":
        gemms.gate_up(case.x_TD, slab, problem, choice, num_routes, buffers)
    else:
        rows_RD = buffers.rows_RD(num_routes, model_dim, problem.dtype)
        gemms.down(rows_RD, slab, problem, choice, num_routes, buffers)


def run_step(case: TuningCase, choice: Choice, workspace: Workspace) -> None:
    """All kernels of a step in their order."""
    problem, buffers = case.problem, workspace.claim(case.problem)
    num_routes = problem.num_tokens * problem.top_k
    prepare(case, choice, workspace)
    if choice.kernel == "persistent":
        rows_RD = buffers.rows_RD(num_routes, problem.shape.model_dim, problem.dtype)
        launch_persistent.gate_up_and_down(
            rows_RD, case.x_TD, case.placement.slab, problem, choice, num_routes, buffers
        )
        launch.reduce(rows_RD, case.weights_TK, buffers, torch.empty_like(case.x_TD))
        return
    run_gemm(case, choice, workspace, "gate_up")
    codes = problem.format in FP8_FORMATS and not launch.codes_in_down(problem, choice.block_m, case.x_TD)
    if choice.kernel == "grouped" and codes:
        launch.quantize_activated(problem, choice.block_m, num_routes, buffers)
    run_gemm(case, choice, workspace, "down")
    if choice.kernel != "direct":
        rows_RD = buffers.rows_RD(num_routes, problem.shape.model_dim, problem.dtype)
        launch.reduce(rows_RD, case.weights_TK, buffers, torch.empty_like(case.x_TD))
