"""`minisgl plan-experts`: which placement, and which replicas, make ranks equally busy, from a recorded routing trace.

A step lasts as long as its busiest rank, so what counts is max / mean of the routes a rank computes, in every layer of every
step. A trace has no steps; windows of tokens stand for them. Replicas are chosen greedily: the expert whose copies on all
ranks help most, again and again, until the gain is not worth the memory. Placement and replicas hold for all layers, as the
flags do, so a model whose layers have different favourites gains less than one whose favourites agree.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.moe.store.shard import ExpertSpread, SpreadKind

CANDIDATES = 8  # hottest experts that are tried for the next replica
KINDS: tuple[SpreadKind, ...] = ("contiguous", "round-robin")


@dataclass(frozen=True)
class Balance:
    """How a spread serves a trace. imbalance: mean over layers and windows of max / mean routes a rank; 1 is perfect.

    memory: experts a rank holds, against none replicated.
    """

    spread: ExpertSpread
    imbalance: float
    memory: float

    @property
    def flags(self) -> str:
        """The command-line flags that ask for it."""
        ranks = f"--tp {self.spread.num_ranks} --expert-parallel-size {self.spread.num_ranks}"
        words = [f"{ranks} --moe-expert-placement {self.spread.kind}"]
        if self.spread.replicated:
            words.append(f"--moe-replicated-experts {','.join(map(str, self.spread.replicated))}")
        return " ".join(words)


def windowed_counts(ids_TLK: np.ndarray, num_experts: int, window: int) -> np.ndarray:
    """Routes of each expert in each window of tokens and layer: float64 [W, L, E]. The rest of a last window is left out
    unless it is the only one; ids of -1 are padding.
    """
    num_tokens, num_layers, _ = ids_TLK.shape
    size = min(window, num_tokens)
    num_windows = num_tokens // size
    counts_WLE = np.zeros((num_windows, num_layers, num_experts))
    for index in range(num_windows):
        for layer in range(num_layers):
            ids = ids_TLK[index * size : (index + 1) * size, layer]
            counts_WLE[index, layer] = np.bincount(ids[ids >= 0], minlength=num_experts)
    return counts_WLE


def measure(counts_WLE: np.ndarray, spread: ExpertSpread) -> Balance:
    """How busy its ranks are. Routes to a replicated expert are shared evenly: they stay where their tokens come from."""
    share_EN = np.zeros((spread.num_experts, spread.num_ranks))
    for expert in range(spread.num_experts):
        share_EN[expert, spread.owner(expert)] = 1.0
    share_EN[list(spread.replicated)] = 1.0 / spread.num_ranks
    load_WLN = counts_WLE @ share_EN
    mean_WL = np.maximum(load_WLN.mean(axis=-1), 1e-12)
    held = max(len(spread.experts_of(rank)) for rank in range(spread.num_ranks))
    memory = held * spread.num_ranks / spread.num_experts
    return Balance(spread, float((load_WLN.max(axis=-1) / mean_WL).mean()), memory)


def propose(
    counts_WLE: np.ndarray, num_ranks: int, kind: SpreadKind, max_replicas: int, min_gain: float = 0.01
) -> list[Balance]:
    """None, one, two … replicas, each the best found; ends where one more lowers the imbalance by less than min_gain.

    Raises ValueError if the experts can't be spread over so many ranks.
    """
    spread = ExpertSpread(counts_WLE.shape[2], num_ranks, kind)
    found = [measure(counts_WLE, spread)]
    heat_E = counts_WLE.sum(axis=(0, 1))
    while len(found[-1].spread.replicated) < max_replicas:
        chosen = found[-1].spread.replicated
        hottest = [int(e) for e in np.argsort(-heat_E, kind="stable") if e not in chosen][:CANDIDATES]
        trials = [ExpertSpread(spread.num_experts, num_ranks, kind, (*chosen, expert)) for expert in hottest]
        if not trials:
            break
        best = min((measure(counts_WLE, trial) for trial in trials), key=lambda balance: balance.imbalance)
        if found[-1].imbalance - best.imbalance < min_gain:
            break
        found.append(best)
    return found


def read_trace(path: Path) -> tuple[np.ndarray, int]:
    """(ids [T, L, K], number of experts) of a file that --moe-trace wrote. ValueError for any other."""
    try:
        with np.load(path) as file:
            ids, num_experts = file["ids"], int(file["num_experts"])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"--trace {path}: not a routing trace ({error}); record one with --moe-trace FILE"
        ) from error
    if ids.ndim != 3 or len(ids) == 0:
        raise ValueError(f"--trace {path}: it holds no tokens; generate something while recording")
    return ids.astype(np.int64), num_experts


def add_plan_experts_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `minisgl plan-experts`."""
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="routing trace, as --moe-trace FILE records it")
    add("--ranks", type=int, default=2, help="ranks that experts are spread over (default 2)")
    add("--max-replicas", type=int, default=8, help="experts held by all ranks, at most (default 8)")
    add("--window", type=int, default=256, help="tokens that are computed in one step (default 256)")
    add("--json", action="store_true", help="one JSON object instead of a table")


def run_plan_experts(args: argparse.Namespace) -> int:
    """Print what was found, best last, and the flags to use."""
    for name, value, least in (
        ("--ranks", args.ranks, 2),
        ("--max-replicas", args.max_replicas, 0),
        ("--window", args.window, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    ids_TLK, num_experts = read_trace(args.trace)
    counts_WLE = windowed_counts(ids_TLK, num_experts, args.window)
    found = [b for kind in KINDS for b in propose(counts_WLE, args.ranks, kind, args.max_replicas)]
    best = min(found, key=lambda balance: (round(balance.imbalance, 3), balance.memory))
    if args.json:
        print(json.dumps({"best": _row(best), "tried": [_row(balance) for balance in found]}))
    else:
        _print(found, best, len(ids_TLK))
    return 0


def _row(balance: Balance) -> dict[str, object]:
    spread = balance.spread
    return {
        "placement": spread.kind,
        "replicated": list(spread.replicated),
        "imbalance": round(balance.imbalance, 4),
        "memory": round(balance.memory, 4),
        "flags": balance.flags,
    }


def _print(found: Sequence[Balance], best: Balance, num_tokens: int) -> None:
    table = Table(title=f"Busiest rank against the mean, {num_tokens:,} tokens", title_justify="left")
    for name in ("placement", "replicated on all ranks", "max / mean", "expert memory"):
        table.add_column(name, justify="right" if name in ("max / mean", "expert memory") else "left")
    for balance in found:
        spread = balance.spread
        replicas = ",".join(map(str, spread.replicated)) or "none"
        numbers = (f"{balance.imbalance:.3f}", f"{balance.memory:.2f} x")
        table.add_row(spread.kind, replicas, *numbers, style="bold" if balance is best else "")
    console = Console()
    console.print(table)
    console.print(f"\n{best.flags}", highlight=False, soft_wrap=True)
