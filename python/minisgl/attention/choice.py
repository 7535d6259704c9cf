"""Which backend `--attention-backend auto` means on a GPU: what a record of measurements says, of what is installed.

`python benchmark/attention.py --write-record` adds a GPU to the record. Without an entry it is triton. Decode steps are
triton's either way, since only its plan holds for a captured graph; the record is about prompts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from minisgl.attention.flashinfer import HEAD_DIMS
from minisgl.measured import add_entry, read_entries

RECORD = Path(__file__).parent / "tuned" / "prompts.json"
CLEARLY = 0.97  # share of triton's time from which on an extra that compiles at its first call is worth it


def write_record(gpu: str, entry: dict[str, Any], path: Path = RECORD) -> None:
    """Keep microseconds of the same prompts by each backend: {"triton_us": .., "flashinfer_us": .., "case": ..}."""
    add_entry(path, gpu, entry)


def fastest(gpu: str, head_dim: int, has_sinks: bool, path: Path = RECORD) -> tuple[str, str]:
    """(backend, why) for prompts of a model in 16 bits on this GPU."""
    entry = read_entries(path).get(gpu)
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
