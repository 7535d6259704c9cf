"""Eviction policies of the prefix cache on request traces, beside Belady's optimum.

    python benchmark/eviction.py                                  # four made-up traces, every policy, a table
    python benchmark/eviction.py --seeds 0,1,2 --check --record   # exit 1 if adaptive finds over 5 % less than the best policy
    python benchmark/eviction.py mooncake_trace.jsonl --pages 2000 --json
    python benchmark/eviction.py chat my_module:MyPolicy          # a trace or a policy, by name, file or import path
    python benchmark/eviction.py --growth --record                # time of choosing a victim, 1,000 to 1,000,000 leaves
    python benchmark/eviction.py --plot plots/                    # needs matplotlib

Every replay uses the real radix tree and page allocator, and checks that no page was lost. Columns: prompt tokens found in the
cache, in all and as a share of what Belady's choice finds; prompt tokens computed again; the cost of that (recompute_cost)
beside the first row's; microseconds spent choosing and cutting, for each page evicted. --record appends to
benchmark/results/eviction.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eviction_replay import Replay, belady, replay
from eviction_traces import TRACES, Trace, load
from minisgl.eviction import ADAPTIVE, POLICIES, SCORES, EvictionConfig, make_policy
from minisgl.kvcache import RadixPrefixCache
from record import append_record

NUM_PAGES = 2720  # 16 tokens each: the 43.5 k tokens that a 12 GB card has left beside a 30B model with cached experts
GROWTH = (1_000, 10_000, 100_000, 1_000_000)
GROWTH_POLICIES = ("lru", "cost-aware", ADAPTIVE, "user")
WITHIN = 0.95


class UserLRU:
    """Stands for a user's policy in --growth: checked, and scored again as time passes."""

    def score(self, entry: Any, now: float) -> float:
        return entry.last_use - now


def traces(args: argparse.Namespace) -> Iterator[tuple[int | None, Trace]]:
    """(seed, trace): made-up ones once a seed, files once."""
    names = [item for item in args.what if item in TRACES or Path(item).suffix == ".jsonl"] or list(TRACES)
    for name in names:
        if name in TRACES:
            yield from ((seed, TRACES[name](seed)) for seed in args.seeds)
        else:
            yield None, load(Path(name), args.block_tokens, args.limit)


def run(trace: Trace, args: argparse.Namespace) -> list[Replay]:
    """Every policy, then Belady."""
    policies = [item for item in args.what if item in POLICIES or ":" in item] or list(POLICIES)
    results = []
    for name in policies:
        config = EvictionConfig(
            policy=name,
            k=args.k,
            half_life=args.half_life,
            experts=args.experts,
            learning_rate=args.learning_rate,
            seed=args.seed,
            ghost_capacity=args.ghost_capacity,
        )
        results.append(replay(trace, make_policy(config), args.pages))
    return [*results, belady(trace, args.pages)]


def show(trace: Trace, results: Sequence[Replay]) -> None:
    best, first = results[-1], results[0]
    print(
        f"\n{trace.name}: {len(trace.requests)} requests, {first.prompt_tokens / 1e6:.2f} M prompt tokens\n"
        f"{'policy':<18}{'hit':>8}{'of optimum':>12}{'recomputed':>12}{'work':>8}{'us/page':>9}{'ghosts':>9}"
    )
    for r in results:
        hit, share = r.hit_tokens / r.prompt_tokens, r.hit_tokens / max(1, best.hit_tokens)
        took = 1e6 * r.evict_seconds / max(1, r.num_evicted)
        print(
            f"{r.policy:<18}{hit:>8.1%}{share:>12.1%}{r.recomputed_tokens / 1e6:>10.2f} M{r.cost / first.cost:>8.3f}"
            f"{took:>9.2f}{r.num_ghost_hits:>9}"
        )
    for r in results:
        if r.weights:
            print(f"{r.policy} weights over time:")
            for moment, weights in r.weights[:: max(1, len(r.weights) // 10)]:
                print(f"  {moment:>8.0f} s  " + "  ".join(f"{n} {w:.2f}" for n, w in weights.items()))


def against_best(results: Sequence[Replay]) -> dict[str, float] | None:
    """Adaptive beside the best single policy: ratios of hit tokens and of recompute work; None without both."""
    single = [r for r in results if r.policy in SCORES]
    adaptive = next((r for r in results if r.policy == ADAPTIVE), None)
    if adaptive is None or not single:
        return None
    hits, work = max(r.hit_tokens for r in single), min(r.cost for r in single)
    return {"hits": adaptive.hit_tokens / max(1, hits), "work": adaptive.cost / max(1.0, work)}


def as_record(
    trace: Trace, seed: int | None, results: Sequence[Replay], args: argparse.Namespace
) -> dict[str, Any]:
    rows = {
        r.policy: {
            "hit_tokens": r.hit_tokens,
            "recomputed_tokens": r.recomputed_tokens,
            "work_token_pairs": r.cost,
            "evicted_pages": r.num_evicted,
            "us_a_page": round(1e6 * r.evict_seconds / max(1, r.num_evicted), 3),
            "ghost_hits": r.num_ghost_hits,
            "weights": [(round(t), {n: round(w, 3) for n, w in ws.items()}) for t, ws in r.weights[::10]],
        }
        for r in results
    }
    return {
        "case": trace.name,
        "seed": seed,
        "pages": args.pages,
        "block_tokens": trace.block_tokens,
        "requests": len(trace.requests),
        "prompt_tokens": results[0].prompt_tokens,
        "adaptive_against_best": against_best(results),
        "policies": rows,
    }


def growth(num_leaves: int, name: str, num_choices: int = 3000) -> dict[str, Any]:
    """Time of one `evict(1)` in a tree of num_leaves unlocked leaves, while leaves are used and added all the time.

    first_us: the first eviction after filling, a leaf: it scores them all. p50, p90, mean of the later ones: each scores what
    changed since the one before (one leaf added, one used) and takes the victim out.
    """
    user = UserLRU() if name == "user" else None
    policy = make_policy(EvictionConfig(policy="lru" if user else name), user)
    ticks, rng = itertools.count(), random.Random(0)
    cache = RadixPrefixCache(1, policy, clock=lambda: float(next(ticks)))
    for token in range(num_leaves):
        cache.insert([token], [token])
    start = time.perf_counter()
    cache.evict(1)
    first = time.perf_counter() - start
    times = []
    for token in range(num_leaves, num_leaves + num_choices):
        cache.insert([token], [token])
        cache.match([rng.randrange(token)])
        start = time.perf_counter()
        pages = cache.evict(1)
        times.append(1e6 * (time.perf_counter() - start))
        assert len(pages) == 1
    cut = statistics.quantiles(times, n=10)
    return {
        "case": "growth",
        "policy": name,
        "leaves": num_leaves,
        "first_us": round(1e6 * first / num_leaves, 3),
        "p50_us": round(statistics.median(times), 2),
        "p90_us": round(cut[8], 2),
        "mean_us": round(statistics.fmean(times), 2),
    }


def plot(trace: Trace, seed: int | None, results: Sequence[Replay], folder: Path) -> Path:
    """Hit share of every policy, and adaptive's weights over time. Returns the picture's path."""
    from matplotlib.figure import Figure  # optional extra; its absence was reported before anything ran

    figure = Figure(figsize=(11, 4), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    shares = [100 * r.hit_tokens / r.prompt_tokens for r in results[:-1]]
    bars.bar([r.policy for r in results[:-1]], shares)
    optimum = 100 * results[-1].hit_tokens / results[-1].prompt_tokens
    bars.axhline(optimum, linestyle="--", color="black", label="Belady")
    bars.tick_params(axis="x", rotation=30)
    bars.set(title=f"{trace.name}: prompt tokens found", ylabel="%")
    bars.legend(loc="lower right")
    learners = [r for r in results if r.weights]
    for r in learners:
        for name in r.weights[0][1]:
            lines.plot([t for t, _ in r.weights], [w[name] for _, w in r.weights], label=name)
        lines.legend()
    lines.set(title="weights of adaptive's experts", xlabel="seconds", ylim=(0, 1))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"eviction_{trace.name}{'' if seed is None else f'_{seed}'}.png"
    figure.savefig(path, dpi=110)
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    default = EvictionConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help=f"traces ({', '.join(TRACES)}, FILE.jsonl) and policies")
    parser.add_argument("--pages", type=int, default=NUM_PAGES, help="pages of one block each")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0])
    parser.add_argument(
        "--block-tokens", type=int, help="of a file; default 16 (Qwen-Bailian), 512 (Mooncake)"
    )
    parser.add_argument("--limit", type=int, help="requests read from a file at most")
    parser.add_argument("--eviction-k", dest="k", type=int, default=default.k)
    parser.add_argument("--eviction-half-life", dest="half_life", type=float, default=default.half_life)
    parser.add_argument("--adaptive-experts", dest="experts", default=",".join(default.experts))
    parser.add_argument(
        "--adaptive-learning-rate", dest="learning_rate", type=float, default=default.learning_rate
    )
    parser.add_argument("--adaptive-seed", dest="seed", type=int, default=default.seed)
    parser.add_argument(
        "--eviction-ghost-capacity", dest="ghost_capacity", type=int, default=default.ghost_capacity
    )
    parser.add_argument("--growth", action="store_true", help="time of a choice against the number of leaves")
    parser.add_argument("--json", action="store_true", help="print a JSON line a trace instead of a table")
    parser.add_argument("--record", action="store_true", help="append to benchmark/results/eviction.jsonl")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if adaptive finds over 5 %% less than the best policy"
    )
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write a picture a trace")
    args = parser.parse_args(argv)
    for item in args.what:
        if not (item in TRACES or item in POLICIES or ":" in item or Path(item).suffix == ".jsonl"):
            parser.error(
                f"{item!r} is no trace ({', '.join(TRACES)}, FILE.jsonl) and no policy ({', '.join(POLICIES)})"
            )
    if args.pages < 1:
        parser.error(f"--pages {args.pages} is not allowed: use at least 1")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'minisgl[plot]'")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.growth:
        for name, num_leaves in itertools.product(GROWTH_POLICIES, GROWTH):
            record = growth(num_leaves, name)
            print(json.dumps(record), flush=True)
            if args.record:
                append_record("eviction", record)
        return 0
    lost = []
    for seed, trace in traces(args):
        results = run(trace, args)
        record = as_record(trace, seed, results, args)
        print(json.dumps(record)) if args.json else show(trace, results)
        if args.record:
            append_record("eviction", record)
        if args.plot:
            print(f"wrote {plot(trace, seed, results, args.plot)}")
        beside = record["adaptive_against_best"]
        if beside and not args.json:
            print(
                f"adaptive against the best single policy: {beside['hits']:.3f} of the hits, {beside['work']:.3f} of the work"
            )
        if beside and beside["hits"] < WITHIN:
            lost.append((trace.name, seed))
    if args.check and lost:
        print(f"adaptive is more than 5 % behind the best single policy on {lost}")
    return 1 if args.check and lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
