"""Where the time of decode steps goes, from a chrome trace: by kernel, and what the GPU does not do.

Kernels overlap (dependent launch lets one start while the one before drains), so the time the GPU works is the length of the
union of their intervals; shares by kernel add up to more than that where they overlap.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
STEP_KERNEL = "decode_inputs_kernel"  # the first kernel of a captured decode step
SAMPLER_KERNEL = "scan_kernel"  # the first one after it
NAME_LENGTH = 64


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device, microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """Decode steps on the device; microseconds a step.

    step_us: from one step's first kernel to the next one's. busy_us: some kernel runs. between_us: idle from the end of a graph
    to the start of the next, less sampling and copies. kernels: name -> (us, launches).
    """

    num_steps: int
    step_us: float
    busy_us: float
    between_us: float
    kernels: dict[str, tuple[float, float]]

    @property
    def idle_percent(self) -> float:
        """Idle time anywhere."""
        return 100 * (1 - self.busy_us / self.step_us)

    @property
    def between_percent(self) -> float:
        """Idle time between steps."""
        return 100 * self.between_us / self.step_us

    def record(self, most: int = 20) -> dict[str, Any]:
        """For a JSON line, with the `most` costliest kernels."""
        return {
            "steps": self.num_steps,
            "step_us": round(self.step_us, 1),
            "busy_us": round(self.busy_us, 1),
            "idle_percent": round(self.idle_percent, 2),
            "idle_between_steps_percent": round(self.between_percent, 2),
            "kernels": {name: [round(us, 2), round(count, 2)] for name, (us, count) in self._costliest(most)},
        }

    def _costliest(self, most: int) -> list[tuple[str, tuple[float, float]]]:
        return sorted(self.kernels.items(), key=lambda entry: -entry[1][0])[:most]

    def table(self, most: int = 20) -> Table:
        """For people."""
        title = (
            f"{self.num_steps} decode steps of {self.step_us:,.0f} us: idle {self.idle_percent:.1f} %, of it between steps "
            f"{self.between_percent:.1f} % of the time"
        )
        table = Table("kernel", "us a step", "launches", "us each", title=title, title_justify="left")
        for name, (us, count) in self._costliest(most):
            table.add_row(name, f"{us:,.1f}", f"{count:g}", f"{us / count:.2f}")
        return table


def profile_steps(step: Callable[[], object], num_steps: int, path: Path) -> Breakdown:
    """Run `step` num_steps times under the profiler and write a chrome trace (.json or .json.gz)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return breakdown(read_spans(path))


def read_spans(path: Path) -> list[Span]:
    """Everything that ran on the device, by start."""
    raw = path.read_bytes()
    events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    spans = [
        Span(e["name"][:NAME_LENGTH], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") in DEVICE_CATEGORIES and "dur" in e
    ]
    return sorted(spans, key=lambda span: span.start)


def breakdown(spans: Sequence[Span]) -> Breakdown:
    """Of the steps between the first and the last start of STEP_KERNEL. ValueError if the trace has fewer than two."""
    starts = [span.start for span in spans if span.name.startswith(STEP_KERNEL)]
    if len(starts) < 2:
        raise ValueError("the trace holds no two decode steps of a CUDA graph: was --cuda-graph-max-bs 0?")
    num_steps = len(starts) - 1
    inside = [span for span in spans if starts[0] <= span.start < starts[-1]]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span in inside:
        kernels[span.name][0] += (span.end - span.start) / num_steps
        kernels[span.name][1] += 1 / num_steps
    busy = between = 0.0
    reached, at_boundary = starts[0], False
    for span in [*inside, Span(STEP_KERNEL, starts[-1], starts[-1])]:
        at_boundary = at_boundary or span.name.startswith(SAMPLER_KERNEL)
        gap = max(0.0, span.start - reached)
        between += gap if at_boundary else 0.0
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
        at_boundary = at_boundary and not span.name.startswith(STEP_KERNEL)
    return Breakdown(
        num_steps,
        (starts[-1] - starts[0]) / num_steps,
        busy / num_steps,
        between / num_steps,
        {name: (us, count) for name, (us, count) in kernels.items()},
    )
