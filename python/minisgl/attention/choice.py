"""Which backend `--attention-backend auto` means on a GPU: what a record of measurements says, of what is installed.

`python benchmark/attention.py --write-record` adds a GPU to the record. Without an entry it is triton. Decode steps are
triton's either way, since only its plan holds for a captured graph; the record is about prompts.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from minisgl.attention.flashinfer import HEAD_DIMS

RECORD = Path(__file__).parent / "tuned" / "prompts.json"
CLEARLY = 0.97  # share of triton's time from which on an extra that compiles at its first call is worth it


def read_record(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """By GPU name: microseconds of the same prompts by each backend, as {"triton_us": .., "flashinfer_us": .., "case": ..}."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_record(gpu: str, entry: dict[str, Any], path: Path = RECORD) -> None:
    """Add or replace the entry of one GPU."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**read_record(path), gpu: entry}
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def fastest(gpu: str, head_dim: int, has_sinks: bool, path: Path = RECORD) -> tuple[str, str]:
    """(backend, why) for prompts of a model in 16 bits on this GPU."""
    entry = read_record(path).get(gpu)
    if entry is None:
        return "triton", "the fastest on cuda without extras"
    measured = f"{entry['case']} take {entry['triton_us']:.0f} us by triton, {entry['flashinfer_us']:.0f} by flashinfer"
    if entry["flashinfer_us"] > CLEARLY * entry["triton_us"]:
        return "triton", f"{measured} on this GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "triton", f'{measured} on this GPU, which pip install "minisgl[flashinfer]" would bring'
    if head_dim not in HEAD_DIMS or has_sinks:
        return "triton", "flashinfer, faster for prompts on this GPU, has no kernels for this model"
    return "flashinfer", f"{measured} on this GPU; decode steps stay triton's"
