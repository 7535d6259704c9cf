"""Real routing for the cache benchmarks: record which experts a model uses on a text, and what an LRU cache would hit.

    python benchmark/routing/trace.py --record             writes demo_trace.npz from tests/data/heldout.txt and the demo model
    python benchmark/routing/trace.py demo_trace.npz        prints the LRU hit rate by slots a layer, beside uniform routing

A trace holds ids int16 [tokens, layers, K] in the order of the text, num_experts, and the layer numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl import LLM
from minisgl.engine.score import token_logprobs

HERE = Path(__file__).parent
TEXT = HERE.parents[1] / "tests" / "data" / "heldout.txt"
WINDOW = 512


def record(model: str, text: Path, target: Path) -> None:
    """Run the text through the model, WINDOW tokens at a time, and save every token's experts."""
    llm = LLM(model, record_routing=True, num_pages=64)
    if llm.trace is None or llm.tokenizer is None:
        raise SystemExit(f"{model} has no experts or no tokenizer: nothing to record")
    ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"))
    for start in range(0, len(ids) - 1, WINDOW):
        window = ids[start : start + WINDOW]
        if len(window) > 1:
            token_logprobs(llm.engine, window)
    llm.trace.save(target)
    print(f"{llm.trace.num_tokens} tokens, {len(llm.trace.layers)} layers: {target}")


def stack_distances(picks: np.ndarray, num_experts: int) -> np.ndarray:
    """LRU stack distance of each pick of one layer, in order: 1 is the latest used expert, num_experts + 1 a first use.

    picks: [tokens, K]. An LRU cache of S slots hits exactly the picks at distance <= S.
    """
    stack: list[int] = []
    out = np.empty(picks.size, dtype=np.int64)
    for i, expert in enumerate(picks.reshape(-1).tolist()):
        if expert in stack:
            at = stack.index(expert)
            out[i] = at + 1
            del stack[at]
        else:
            out[i] = num_experts + 1
        stack.insert(0, expert)
    return out


def hit_rates(ids_TLK: np.ndarray, num_experts: int, slots: list[int]) -> np.ndarray:
    """[layers, len(slots)]: share of picks that an LRU cache of so many slots a layer would hold."""
    rows = []
    for layer in range(ids_TLK.shape[1]):
        distances = stack_distances(ids_TLK[:, layer], num_experts)
        rows.append([(distances <= s).mean() for s in slots])
    return np.array(rows)


def show(path: Path) -> None:
    """Print the hit-rate curve of every layer and their mean, and what uniform random routing would give."""
    trace = np.load(path)
    ids, num_experts = trace["ids"], int(trace["num_experts"])
    top_k = ids.shape[2]
    slots = sorted(
        {
            max(1, round(num_experts * share))
            for share in (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1)
        }
    )
    rng = np.random.default_rng(0)
    uniform = np.argsort(rng.random((ids.shape[0], num_experts)), axis=1)[:, None, :top_k]
    table = Table(
        title=f"LRU hit rate, {ids.shape[0]} tokens, {num_experts} experts, top-{top_k}", title_justify="left"
    )
    table.add_column("layer")
    for s in slots:
        table.add_column(f"{s} slots", justify="right")
    rates = hit_rates(ids, num_experts, slots)
    for layer, row in zip(trace["layers"], rates):
        table.add_row(str(layer), *(f"{value:.1%}" for value in row))
    table.add_row("mean", *(f"{value:.1%}" for value in rates.mean(axis=0)), style="bold")
    table.add_row(
        "uniform", *(f"{value:.1%}" for value in hit_rates(uniform, num_experts, slots)[0]), style="dim"
    )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, default=HERE / "demo_trace.npz", help="trace to show, or to write"
    )
    parser.add_argument("--record", action="store_true", help="run the model and write the trace first")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=TEXT)
    args = parser.parse_args()
    if args.record:
        record(args.model, args.text, args.trace)
    show(args.trace)


if __name__ == "__main__":
    main()
