"""What fetching on a guess gains or costs: decode steps with guesses of which a given share is right, beside none at all.

    python benchmark/prefetch.py --format fp8 --slots 30 --recall off,0,0.5,0.8,1
    python benchmark/prefetch.py --format int4 --slots 49 --layers 12
    python benchmark/prefetch.py --recall off,0 --window 8         layers that have stopped guessing, before they are measured
    python benchmark/prefetch.py --recall-of demo           how often a model's guesses are right, on any device

Routing is forced as in offload.py, and so are the guesses: of the experts that the next layer will use, each is guessed with
probability `recall`, else any other one. Guessing costs what it costs in a model: router and choice run all the same. Appends a
JSON line to benchmark/results/prefetch.jsonl.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from typing import Any

import numpy as np
import torch
from rich.console import Console

from minisgl import LLM, SamplingParams
from minisgl.layers.moe import MoELayer
from minisgl.moe.backend import MoeBackend
from minisgl.moe.store import device_plan
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.early import WINDOW
from minisgl.moe.store.overlap import Forked
from minisgl.moe.store.pinned import HostRecords
from minisgl.moe.store.planning import SlotTable, place_step
from offload import WARM_STEPS, Bench, Source
from record import append_record
from routing.forced import ForcedBackend, ForcedRouting
from routing.synthetic import make_routing


def guesses_of(ids_NLTK: np.ndarray, recall: float, num_experts: int) -> np.ndarray:
    """As many ids as there are, each right with probability `recall`."""
    rng = np.random.default_rng(1)
    wrong = (ids_NLTK + rng.integers(1, num_experts, ids_NLTK.shape)) % num_experts
    return np.where(rng.random(ids_NLTK.shape) < recall, ids_NLTK, wrong).astype(ids_NLTK.dtype)


def force(bench: Bench) -> None:
    """The buffer of forced ids gets a second half: what is guessed of every layer."""
    num_layers = len(bench.layers)
    inner: list[MoeBackend] = [layer.backend._inner for layer in bench.layers]
    bench.forced = ForcedRouting(2 * num_layers, bench.batch, bench.top_k, bench.device)
    for index, layer in enumerate(bench.layers):
        layer.backend = ForcedBackend(inner[index], bench.forced, index)


def use(bench: Bench, num_slots: int, prefetches: bool) -> None:
    """New stores, graphs, and guesses for all layers."""
    shared = bench.engine._offload
    assert shared is not None
    overlap = Forked(bench.device, prefetches)

    def make(old: Source) -> DeviceStore:
        host = HostRecords(old.records_EB, bench.num_experts)
        return DeviceStore(
            host,
            old.shape,
            old.format,
            num_slots,
            bench.top_k,
            bench.device,
            shared._transient_slots,
            overlap,
        )

    for index, layer in enumerate(bench.layers[:-1]):
        layer.guess = forced_guess(bench, bench.layers[index + 1], index + 1) if prefetches else None
    bench.use(make)


def forced_guess(bench: Bench, following: MoELayer, index: int) -> Any:
    def guess(x_TD: torch.Tensor, num_valid: torch.Tensor | None) -> torch.Tensor:
        following.backend.route(following.router(x_TD), following.router.rule, None, num_valid)
        return bench.forced.routing(len(bench.layers) + index, len(x_TD), bench.num_experts).ids_TK

    return guess


def measure(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    device_plan.WINDOW = args.window
    bench = Bench(args, args.format, args.batch)
    if bench.mode != "device":
        raise SystemExit("not every expert is pinned: there is no prefetching")
    force(bench)
    num_layers, num_tokens = len(bench.layers), (args.steps + WARM_STEPS) * args.batch
    ids_NLK = make_routing(args.routing, num_tokens, num_layers, bench.num_experts, bench.top_k)
    ids_NLTK = np.ascontiguousarray(ids_NLK.reshape(-1, args.batch, num_layers, bench.top_k).swapaxes(1, 2))
    rows = []
    for recall in args.recall.split(","):
        use(bench, int(args.slots), recall != "off")
        guessed = guesses_of(ids_NLTK, 0.0 if recall == "off" else float(recall), bench.num_experts)
        before = bench.counters()
        row = bench.decode(np.concatenate([ids_NLTK, guessed], 1), args.context)
        done = bench.counters() - before
        row |= {"recall": recall, "early_bytes": done.early_bytes, "useful_bytes": done.useful_bytes}
        rows.append({**row, "layers_off": done.early_off})
        steps = len(ids_NLTK)
        console.print(
            f"{args.format} {args.slots} slots, {args.routing}, recall {recall:>4}: {row['ms']:.3f} ms/step, "
            f"{row['hit_rate']:.1%} hits, {row['bytes'] / 1e6:.1f} MB a step, early {done.early_bytes / steps / 1e6:.2f}, "
            f"of use {done.useful_bytes / steps / 1e6:.2f}, off in {done.early_off} layers",
            highlight=False,
        )
    bench.llm.close()
    del bench
    gc.collect()
    return rows


def recall_of(model: str, console: Console) -> list[dict[str, Any]]:
    """By layer: the share of experts used that the layer before guessed, and the share of those that an LRU cache of a quarter
    of the experts lacked at that moment; of text that the model draws by itself."""
    llm = LLM(model, num_pages=64)
    layers = list(llm.engine.decoder.moe_layers().values())
    inputs: list[list[torch.Tensor]] = [[] for _ in layers]
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, seen=inputs[index]: seen.append(args[0].clone()))
    llm.generate([[1]], SamplingParams(temperature=1, seed=0, max_tokens=400, ignore_eos=True))
    rows = []
    for index in range(1, len(layers)):
        router, route = layers[index].router, layers[index].backend.route
        used, guessed = (
            route(router(torch.cat(x)), router.rule, router.choice_bias).ids_TK.tolist()
            for x in (inputs[index], inputs[index - 1])
        )
        num_experts = router.weight.shape[0]
        table = SlotTable(num_experts, num_experts // 4)
        right: list[bool] = []
        missing: list[bool] = []
        for now, (experts, guess) in enumerate(zip(used, guessed), start=1):
            right += [expert in guess for expert in experts]
            missing += [table.slot_of_E[expert] < 0 for expert in experts]
            place_step(table, Counter(experts), now)
        of_missing = [yes for yes, absent in zip(right, missing) if absent]
        row = {"layer": index, "recall": np.mean(right).item(), "of_missing": np.mean(of_missing).item()}
        console.print(
            f"layer {index}: {row['recall']:.1%} guessed, {row['of_missing']:.1%} of what a cache of {num_experts // 4} lacked",
            highlight=False,
        )
        rows.append(row)
    llm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the real shape has")
    parser.add_argument("--format", default="fp8")
    parser.add_argument("--slots", default="30", help="slots a layer")
    parser.add_argument("--routing", default="local", help="random, local, hits=P@S or a trace")
    parser.add_argument(
        "--recall", default="off,0,0.5,0.8,1", help="shares of right guesses; off: none at all"
    )
    parser.add_argument(
        "--window", type=int, default=WINDOW, help="guesses after which a layer's prefetching is judged"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument(
        "--recall-of", metavar="MODEL", help="only measure how often this model's guesses are right"
    )
    parser.set_defaults(
        mode="auto", max_prefill_length=8192, kv_tokens=32768, gpu_memory_limit=None, embedding_on_host=False
    )
    args = parser.parse_args()
    console = Console(width=160)
    rows = recall_of(args.recall_of, console) if args.recall_of else measure(args, console)
    append_record("prefetch", {"case": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
