"""Experts in host memory: time of a decode step and of a prompt, beside what the link allows. Random weights of a real shape.

    python benchmark/offload.py --format fp8 --slots 8,30,60 --routing random,local           decode, one row a combination
    python benchmark/offload.py --format int4 --slots auto --gpu-memory-limit 12 --routing local --prefill 8,64,256,8192
    python benchmark/offload.py --overlap forked,serial --slots 30 --routing local             compare ways to overlap
    python benchmark/offload.py --slots 49 --prefill 8,64 --prompts-by host,device             compare who plans prompts

Routing is forced where a backend decides it (`backend.route`), so the model runs as always, its CUDA graphs too. For every row:

    bound = step without experts + sum over layers of max(experts when resident, missed bytes / link)

since a layer must end before the next begins; the three parts are measured in the same run. Without those of resident experts
(`--no-resident`, or where not all fit on the device) there is no bound: what the link alone takes is shown. Misses are those of
the definition in `moe/store/planning.py` on the same routing: a row that fetched something else (a cache that keeps the wrong
experts, a routing that wasn't the forced one) is refused, not recorded. Appends a JSON line to benchmark/results/offload.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from engine import SHAPES
from minisgl import LLM, SamplingParams
from minisgl.core import Request
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store import CacheCounters, ExpertStore, ResidentStore, StagedStore
from minisgl.moe.store.device_cache import DeviceStore, Serial
from minisgl.moe.store.pinned import HostRecords
from offload_expected import check_bytes, expected_misses
from offload_report import plot, show_decode, show_prompt
from record import append_record, event_ms
from routing.forced import ForcedBackend, ForcedRouting, one_layer_of_random_weights, prompts_by
from routing.synthetic import make_routing

TINY = {
    **SHAPES["qwen3-30b-a3b"],
    **{
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "vocab_size": 512,
    },
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 16},
    "num_experts_per_tok": 4,
}
WARM_STEPS = 64  # the caches hold what they would hold in the long run


class Source(NamedTuple):
    """What the stores of a layer are made from."""

    records_EB: torch.Tensor
    shape: ExpertShape
    format: ExpertFormat


class Bench:
    """One model with one expert format; `use` gives its layers other stores around the same host records."""

    def __init__(self, args: argparse.Namespace, weight_format: str, batch: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="offload-"))
        shape = dict(TINY if args.shape == "tiny" else SHAPES[args.shape])
        if args.layers:
            shape["num_hidden_layers"] = args.layers
        (folder / "config.json").write_text(json.dumps(shape))
        options: dict[str, Any] = {"max_total_tokens": args.kv_tokens}
        if args.gpu_memory_limit:
            options["gpu_memory_limit"] = f"{args.gpu_memory_limit}GiB"
            options["memory_ratio"] = args.memory_ratio
        auto = args.slots == "auto"
        with one_layer_of_random_weights():
            self.llm = LLM(
                str(folder),
                dummy_weight=True,
                moe_expert_offload=True,
                moe_offload_mode=args.mode,
                moe_expert_cache_size="auto" if auto else max(int(s) for s in args.slots.split(",")),
                moe_expert_quantization=weight_format,
                moe_quantization_group_size=32 if args.shape == "tiny" else 128,
                max_running_requests=max(batch, 1),
                max_prefill_length=args.max_prefill_length,
                cache_type="naive",
                embedding_on_host=args.embedding_on_host,
                **options,
            )
        engine = self.llm.engine
        if engine._offload is None:
            raise SystemExit("every expert fits on the device: give fewer --slots or a --gpu-memory-limit")
        self.engine, self.device, self.mode = engine, engine.device, engine._offload.mode
        self.layers: list[Any] = list(engine.decoder.moe_layers().values())
        moe = engine.spec.moe
        assert moe is not None
        self.num_experts, self.top_k, self.batch = moe.num_experts, moe.rule.top_k, batch
        stores: list[Any] = [layer.store for layer in self.layers]
        self.sources = [Source(store.records_EB, store.shape, store.format) for store in stores]
        self.num_slots, self.record_bytes = stores[0].num_slots, stores[0].layout.nbytes
        self.is_own = True  # the engine's stores are there as it made them
        self.forced = ForcedRouting(len(self.layers), batch, self.top_k, self.device)
        for index, layer in enumerate(self.layers):
            layer.backend = ForcedBackend(layer.backend, self.forced, index)
        engine._graphs = None  # they hold the routing that the model's own routers choose
        self._captured = False

    def _capture(self) -> None:
        """New graphs: those hold the stores' memory, and whatever decided the routing when they were captured."""
        gc.collect()  # the old ones: they refer to themselves
        with torch.inference_mode():
            self.engine._graphs = self.engine._make_graphs()
        self._captured = True

    def use(self, make: Callable[[Source], ExpertStore]) -> None:
        """New stores for all layers, made from the records; and new graphs."""
        self.engine._graphs = None
        self.is_own = False
        for layer in self.layers:
            layer.store = None  # type: ignore[assignment]
        gc.collect()  # the old stores' slabs: there may not be room for both
        torch.cuda.empty_cache()
        made = [make(source) for source in self.sources]
        for layer, store in zip(self.layers, made):
            layer.store = store
        for one, following in pairwise(made):
            if isinstance(one, DeviceStore) and isinstance(following, DeviceStore):
                one.following = following
        self._capture()

    def use_cached(self, num_slots: int, overlap: str) -> None:
        """A cache of so many slots a layer; the engine's own if that is one and still there."""
        if not (self.is_own and num_slots == self.num_slots and overlap == "forked"):
            self.use(self.cached(num_slots, overlap))
        elif not self._captured:
            self._capture()

    def cached(self, num_slots: int, overlap: str) -> Callable[[Source], ExpertStore]:
        """What `use` takes, for a cache of so many slots a layer."""
        shared = self.engine._offload
        assert shared is not None

        def make(old: Source) -> ExpertStore:
            pinned = self.num_experts if self.mode == "device" else 0
            host = HostRecords(old.records_EB, pinned)
            if self.mode == "staged":
                return StagedStore(host, old.shape, old.format, num_slots, self.device, shared._copies)
            way = Serial() if overlap == "serial" else shared._overlap
            transient = shared._transient_slots
            return DeviceStore(
                host, old.shape, old.format, num_slots, self.top_k, self.device, transient, way
            )

        return make

    def resident(self, old: Source) -> ExpertStore:
        """What `use` takes, for all experts on the device."""
        store = ResidentStore(self.num_experts, old.shape, old.format, self.device)
        store.records_EB.copy_(old.records_EB)
        return store

    def counters(self) -> CacheCounters:
        counted = [layer.store.counters() for layer in self.layers]
        return sum((c for c in counted if c is not None), CacheCounters())

    def prompt(self, num_tokens: int) -> dict[str, Any]:
        """Seconds until the first token of one prompt, and what it fetched."""
        ids = tuple(
            np.random.default_rng(num_tokens).integers(0, self.engine.vocab_size, num_tokens).tolist()
        )
        self.forced.draw_prompt(num_tokens, self.num_experts)
        self._synchronize()
        before, held = self.counters(), self._held()
        start = time.perf_counter()
        self.llm.generate([list(ids)], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        seconds, done = time.perf_counter() - start, self.counters() - before
        total = sum(map(len, held))
        kept = sum(len(one & two) for one, two in zip(held, self._held())) / total if total else 1.0
        return {
            "tokens": num_tokens,
            "s": seconds,
            "bytes": done.num_bytes,
            "hit_rate": done.hit_rate,
            "kept": kept,
        }

    def _held(self) -> list[set[int]]:
        """Experts in the slots of each layer."""
        views = [layer.store.view() for layer in self.layers]
        return [
            set() if view is None else set(view.resident_E.nonzero().flatten().tolist()) for view in views
        ]

    def decode(self, ids_NLTK: np.ndarray, context: int) -> dict[str, Any]:
        """Milliseconds a step, over all steps after WARM_STEPS, of `batch` requests with `context` tokens before them."""
        assert self._captured, "`use` or `use_cached` comes first"
        steps = torch.from_numpy(ids_NLTK).to(self.device)
        params = SamplingParams(temperature=0, max_tokens=len(steps) + 8, ignore_eos=True)
        rng = np.random.default_rng(0)
        scheduler, names = (
            self.llm.scheduler,
            [f"offload-{time.monotonic_ns()}-{i}" for i in range(self.batch)],
        )
        for name in names:
            prompt = tuple(rng.integers(0, self.engine.vocab_size, context).tolist())
            scheduler.add(Request(name, prompt, params))
        started: set[str] = set()
        while len(started) < self.batch:
            started |= {o.request_id for o in scheduler.step() if o.token_id is not None}
        for step, ids_LTK in enumerate(steps):
            if step == WARM_STEPS:
                self._synchronize()
                before, start = self.counters(), time.perf_counter()
            self.forced.ids_LTK.copy_(ids_LTK)
            scheduler.step()
        self._synchronize()
        seconds, done = time.perf_counter() - start, self.counters() - before
        for name in names:
            scheduler.abort(name)
        while scheduler.has_work:
            scheduler.step()
        timed = len(steps) - WARM_STEPS
        return {"ms": seconds / timed * 1e3, "hit_rate": done.hit_rate, "bytes": done.num_bytes / timed}

    def experts_ms(self, ids_LTK: np.ndarray) -> float:
        """Milliseconds of all MoE layers of a step with this routing, one after the other, as a graph. With resident stores."""
        self.forced.ids_LTK.copy_(torch.from_numpy(ids_LTK))
        x_TD = torch.randn(
            self.batch, self.engine.spec.model_dim, device=self.device, dtype=self.engine.dtype
        )
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            for layer in self.layers:
                layer(x_TD)
            with torch.cuda.graph(graph):
                for layer in self.layers:
                    layer(x_TD)
        return event_ms(graph.replay)

    def link_bytes_per_s(self) -> float:
        """Of the copy engine, from these very records."""
        source = self.sources[0].records_EB
        target = torch.empty_like(source, device=self.device)
        return source.nbytes / event_ms(lambda: target.copy_(source, non_blocking=True), repeats=8) * 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def routings_of(args: argparse.Namespace, bench: Bench) -> dict[str, np.ndarray]:
    """int32 [steps, layers, batch, K] by kind. The requests of a step are neighbours in one stream of tokens."""
    made = {}
    layers, num_tokens = len(bench.layers), (args.steps + WARM_STEPS) * args.batch
    for kind in args.routing.split(","):
        ids_NLK = make_routing(kind, num_tokens, layers, bench.num_experts, bench.top_k)
        ids_NLTK = ids_NLK.reshape(-1, args.batch, layers, bench.top_k).swapaxes(1, 2)
        made[kind] = np.ascontiguousarray(ids_NLTK)
    return made


def resident_parts(args: argparse.Namespace, bench: Bench, ids_NLTK: np.ndarray) -> dict[str, float]:
    """What a step takes with all experts on the device, and how much of it the MoE layers do."""
    bench.use(bench.resident)
    parts = {
        "experts_ms": bench.experts_ms(ids_NLTK[0]),
        "resident_ms": bench.decode(ids_NLTK, args.context)["ms"],
    }
    for num_tokens in prompt_lengths(args):
        bench.prompt(num_tokens)  # kernels compile at their first call
        parts[f"prompt_{num_tokens}_s"] = bench.prompt(num_tokens)["s"]
    return parts


def prompt_lengths(args: argparse.Namespace) -> list[int]:
    return [int(n) for n in args.prefill.split(",") if n]


def decode_row(
    args: argparse.Namespace, bench: Bench, ids_NLTK: np.ndarray, parts: dict[str, float], link: float | None
) -> dict[str, Any]:
    """One measurement beside its bound; see the module."""
    num_slots = bench.layers[0].store.num_slots
    row: dict[str, Any] = {**parts, **bench.decode(ids_NLTK, args.context), "link_bytes_per_s": link}
    misses = expected_misses(ids_NLTK, bench.num_experts, num_slots, bench.mode)[WARM_STEPS:]
    row["expected_bytes"] = float(misses.sum(1).mean()) * bench.record_bytes
    if link:
        link_ms = misses * bench.record_bytes / link * 1e3
        row["link_ms"] = float(link_ms.sum(1).mean())
        if parts:
            rest, experts_ms = parts["resident_ms"] - parts["experts_ms"], parts["experts_ms"]
            row["bound_ms"] = rest + float(np.maximum(link_ms, experts_ms / misses.shape[1]).sum(1).mean())
    return row


def measure(args: argparse.Namespace, console: Console, rows: list[dict[str, Any]]) -> None:
    """Appends to `rows`. Raises SystemExit where a row would be none; those before it stay."""
    deadline = time.monotonic() + args.time_limit
    for weight_format in args.format.split(","):
        start = time.perf_counter()
        bench = Bench(args, weight_format, args.batch)
        seconds = time.perf_counter() - start
        console.print(f"{weight_format}: loaded in {seconds:.1f} s, {bench.mode}, {bench.num_slots} slots")
        on_cuda = bench.device.type == "cuda"
        link = bench.link_bytes_per_s() if on_cuda else None
        slots = [bench.num_slots] if args.slots == "auto" else [int(s) for s in args.slots.split(",")]
        routings = routings_of(args, bench)
        parts: dict[str, float] = {}
        if on_cuda and args.resident and not args.gpu_memory_limit:
            parts = resident_parts(args, bench, next(iter(routings.values())))
            console.print({name: round(value, 2) for name, value in parts.items()})
        for num_slots, overlap in [(n, way) for n in slots for way in args.overlap.split(",")]:
            case = {"format": weight_format, "slots": num_slots, "overlap": overlap, "batch": args.batch}
            bench.use_cached(num_slots, overlap)
            for kind, ids_NLTK in routings.items():
                if "@" in kind and int(kind.split("@")[1]) != num_slots:
                    continue  # it has that hit rate with that many slots only
                if time.monotonic() > deadline:
                    console.print("[yellow]time limit: the rest is left out[/]")
                    return
                row = {**case, "routing": kind, **decode_row(args, bench, ids_NLTK, parts, link)}
                check_bytes(row)
                rows.append(row)
                show_decode(rows[-1], console, header=len(rows) == 1)
            for num_tokens, who in product(prompt_lengths(args), args.prompts_by.split(",")):
                with prompts_by(who):
                    bench.prompt(num_tokens)  # kernels compile at their first call
                    row = {**case, "planned_by": who, **bench.prompt(num_tokens)}
                resident = {"resident_s": parts.get(f"prompt_{num_tokens}_s")}
                rows.append({**row, **resident, "link_bytes_per_s": link})
                show_prompt(rows[-1], console)
        bench.llm.close()
        del bench
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="qwen3-30b-a3b, or tiny (a CPU can run it)")
    parser.add_argument("--layers", type=int, help="fewer layers than the real shape has")
    parser.add_argument("--format", default="fp8", help="expert formats, comma separated")
    parser.add_argument("--slots", default="8,16,32,49,64", help="slots a layer, comma separated, or auto")
    parser.add_argument(
        "--routing",
        default="random,local",
        help="random, local, hits=P@S (for S slots) or a trace, comma separated",
    )
    parser.add_argument("--mode", default="auto", choices=("auto", "device", "staged"))
    parser.add_argument("--overlap", default="forked", help="forked, serial (device mode), comma separated")
    parser.add_argument("--batch", type=int, default=1, help="requests that decode together")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the measured ones")
    parser.add_argument("--steps", type=int, default=64, help="measured steps")
    parser.add_argument("--prefill", default="", help="prompt lengths to measure, comma separated")
    parser.add_argument(
        "--prompts-by", default="auto", help="who plans them: auto, device, host, comma separated"
    )
    parser.add_argument("--max-prefill-length", type=int, default=8192)
    parser.add_argument("--kv-tokens", type=int, default=32768)
    parser.add_argument(
        "--gpu-memory-limit",
        type=float,
        help="GiB the engine may use; all experts resident aren't measured then",
    )
    parser.add_argument("--memory-ratio", type=float, default=0.9, help="with --gpu-memory-limit")
    parser.add_argument("--embedding-on-host", action="store_true", help="leave its memory to experts")
    parser.add_argument(
        "--no-resident", dest="resident", action="store_false", help="don't measure all experts resident"
    )
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no new row begins")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows")
    args = parser.parse_args()
    console = Console(width=140)
    rows: list[dict[str, Any]] = []
    try:
        measure(args, console, rows)
    finally:
        if rows:
            append_record("offload", {"case": vars(args), "rows": rows})
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
