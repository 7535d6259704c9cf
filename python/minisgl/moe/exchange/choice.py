"""Which dispatch `--moe-ep-dispatch auto` means: the one that a record of measurements says is the fastest on this machine.

`python benchmark/parallel.py --device cuda --write-record` adds a GPU and a number of ranks to the record.
"""

from __future__ import annotations

import math
from pathlib import Path

from minisgl.measured import add_entry, read_entries

RECORD = Path(__file__).parents[1] / "tuned" / "dispatch.json"
Entry = dict[str, dict[str, float]]  # dispatch -> tokens a rank -> microseconds of one layer


def write_record(gpu: str, num_ranks: int, entry: Entry, path: Path = RECORD) -> None:
    """Keep what was measured on one GPU with one number of ranks."""
    add_entry(path, key(gpu, num_ranks), entry)


def key(gpu: str, num_ranks: int) -> str:
    return f"{gpu} x{num_ranks}"


def fastest(gpu: str, num_ranks: int, path: Path = RECORD) -> tuple[str, str]:
    """(dispatch, why): the lowest geometric mean over the numbers of tokens at which all were measured. Never dynamic: decode
    steps would lose their CUDA graphs, which the time of a layer doesn't show.
    """
    found: Entry = read_entries(path).get(key(gpu, num_ranks), {})
    entry = {name: times for name, times in found.items() if name != "dynamic"}
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
