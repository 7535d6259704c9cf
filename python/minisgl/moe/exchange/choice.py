"""Which dispatch `--moe-ep-dispatch auto` means: the one that a record of measurements says is the fastest on this machine.

`python benchmark/parallel.py --device cuda --write-record` adds a GPU and a number of ranks to the record.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

RECORD = Path(__file__).parents[1] / "tuned" / "dispatch.json"
Entry = dict[str, dict[str, float]]  # dispatch -> tokens a rank -> microseconds of one layer


def read_record(path: Path = RECORD) -> dict[str, Entry]:
    """Entries by `key`."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_record(gpu: str, num_ranks: int, entry: Entry, path: Path = RECORD) -> None:
    """Add or replace the entry of one GPU and number of ranks."""
    record = {**read_record(path), key(gpu, num_ranks): entry}
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def key(gpu: str, num_ranks: int) -> str:
    return f"{gpu} x{num_ranks}"


def fastest(gpu: str, num_ranks: int, path: Path = RECORD) -> tuple[str, str]:
    """(dispatch, why): the lowest geometric mean over the numbers of tokens at which all were measured."""
    entry = read_record(path).get(key(gpu, num_ranks))
    if not entry:
        return "reduce", "no record of this GPU says that another is faster"
    common = sorted(set.intersection(*(set(times) for times in entry.values())), key=int)
    if not common:
        return "reduce", "the record of this GPU has no number of tokens at which all were measured"
    mean = {
        name: math.exp(math.fsum(math.log(times[n]) for n in common) / len(common))
        for name, times in entry.items()
    }
    best = min(mean, key=lambda name: mean[name])
    figures = ", ".join(f"{name} {us:.0f}" for name, us in sorted(mean.items(), key=lambda item: item[1]))
    return best, f"us a layer on this GPU, mean over {', '.join(common)} tokens a rank: {figures}"
