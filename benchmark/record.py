"""Records of measurements: one JSON line each, with the commit, the hardware and the versions that gave it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(os.environ.get("MINISGL_RESULTS", Path(__file__).parent / "results"))


def environment() -> dict[str, Any]:
    """Commit, GPU (or processor), and versions."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "gpu": gpu,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }


def append_record(name: str, record: Mapping[str, Any]) -> Path:
    """Append one line to results/NAME.jsonl ($MINISGL_RESULTS names another folder); returns the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({**environment(), **record}) + "\n")
    return path


def event_ms(call: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median milliseconds of a call on the device, by CUDA events."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of repeated timings."""

    median: float
    p10: float
    p90: float


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> Spread:
    """Microseconds a call, over replays of one graph that holds them all."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # alive until the graph is done, so that none shares its output
    times = []
    for index in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    times.sort()
    return Spread(times[len(times) // 2], times[len(times) // 10], times[-1 - len(times) // 10])


def bf16_peak(size: int = 8192) -> float:
    """FLOP/s of one large bf16 product: this machine's own ceiling."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (event_ms(lambda: a @ b, repeats=10) / 1e3)


def hbm_bandwidth(num_bytes: int = 2**31) -> float:
    """Bytes/s of a device-to-device copy, read and written bytes both counted: this machine's own ceiling."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    source.random_(0, 255)
    target = torch.empty_like(source)
    return 2 * num_bytes / (event_ms(lambda: target.copy_(source)) / 1e3)
