"""One MoE layer over several ranks: time, bytes sent, balance and exposed communication of every way to dispatch.

    python benchmark/parallel.py                                               # CPU ranks over Gloo, a small layer
    python benchmark/parallel.py --device cuda --shape qwen3-30b-a3b --ranks 2 --tokens 1,16,64,256,4096 --format none,fp8

Every case is checked first: all ranks against a layer that holds every expert. Exposed communication is the time of the layer
less that of the same work with every collective replaced by its recorded result, so what overlaps is not counted. The layer
that holds every expert is timed too, on the tokens of all ranks: what one GPU would take; efficiency is that against N times
the layer's time. A timed call runs the layer on several inputs, so that the experts of one are not still in the L2 cache for
the next. On CUDA, layers that a graph can hold are timed as graphs; NVLink multicast is left off. Appends a line a case to
benchmark/results/parallel.jsonl. Ranks over Gloo show what is sent and that it is right; their times are those of the host.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, RoutingRule
from minisgl.moe.exchange import DISPATCHES, Dispatched, Exchange, Local, make_exchange
from minisgl.moe.exchange.choice import Entry, write_record
from minisgl.moe.formats import get_format
from minisgl.moe.registry import make_backend
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import Flight, Group, Rendezvous, TorchGroup, backend_for
from record import append_record

SHAPES = {  # D, F, experts, top-k
    "small": (256, 128, 32, 4),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}
MODES = ("tp", "reduce", "dynamic", "dynamic-no-overlap", "static", "static-no-overlap")
NUM_INPUTS = 4  # a timed call: 4 x 8 experts of 9 MB are more than an L2 cache holds
WARM, REPEATS = 3, 20
TOLERANCE = 0.03  # of the largest output; partial sums are rounded once a rank


@dataclass(frozen=True)
class Case:
    mode: str
    num_ranks: int
    tokens_per_rank: int
    shape: str
    format: str
    kind: str


class RecordedGroup(Group):
    """A group that notes what its collectives gave and how many bytes this rank sent, and can give it again without any.

    sent counts what the usual algorithms send: a ring all-reduce 2 (N - 1) / N of the tensor, the others N - 1 parts.
    """

    def __init__(self, real: Group) -> None:
        self.real, self.rank, self.size, self.graph_safe = real, real.rank, real.size, real.graph_safe
        self.mode, self.sent, self._results, self._next = "pass", 0.0, [], 0

    def set_mode(self, mode: str) -> None:
        """pass: only forward; record: note from here on; replay: give the noted results from the first on, again and again."""
        self.mode, self._next = mode, 0
        if mode == "record":
            self.sent, self._results = 0.0, []

    def _call(self, num_bytes: float, collective: Callable[[], Flight]) -> Flight:
        if self.mode == "replay":
            result = self._results[self._next % len(self._results)]
            self._next += 1
            return Flight(result)
        flight = collective()
        if self.mode == "record":
            self.sent += num_bytes
            self._results.append(flight.wait().clone())
        return flight

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        part = 2 * (self.size - 1) / self.size
        return self._call(part * x.nbytes, lambda: Flight(self.real.all_reduce(x))).wait()

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._call((self.size - 1) * x.nbytes, lambda: Flight(self.real.all_gather(x, dim))).wait()

    def start_gather(self, x_CX: torch.Tensor) -> Flight:
        return self._call((self.size - 1) * x_CX.nbytes, lambda: self.real.start_gather(x_CX))

    def start_exchange(self, x_RX: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Flight:
        away = (sum(sent) - sent[self.rank]) * x_RX[:1].nbytes
        return self._call(away, lambda: self.real.start_exchange(x_RX, sent, received))


class Layers:
    """The layers of all cases of one shape and format: the same experts, whole and as each mode has this rank hold them."""

    def __init__(self, shape: str, weights: str, device: torch.device) -> None:
        model_dim, hidden_dim, num_experts, top_k = SHAPES[shape]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device, self.format = device, get_format(weights, self.dtype)
        self._shape, self._backend = ExpertShape(model_dim, hidden_dim), make_backend("auto", device)
        self._router = Router(num_experts, model_dim, RoutingRule(top_k), device=device, dtype=self.dtype)
        generator = torch.Generator(device).manual_seed(1)
        self._router.weight.normal_(0.0, model_dim**-0.5, generator=generator)
        self._whole = self._store(num_experts, self._shape)
        self._whole.fill_random(seed=2, std=model_dim**-0.5)
        self._stores: dict[tuple[str, int, str], ResidentStore] = {}
        self.whole = MoELayer(self._router, self._whole, self._backend)

    def _store(self, num_experts: int, shape: ExpertShape) -> ResidentStore:
        return ResidentStore(num_experts, shape, self.format, self.device)

    def layer(self, case: Case, group: RecordedGroup) -> MoELayer:
        """This rank's layer."""
        num_experts, name = self._whole.num_experts, case.mode.partition("-")[0]
        spread = ExpertSpread(num_experts, case.num_ranks, case.kind)  # type: ignore[arg-type]
        key = ("tp" if name == "tp" else "ep", case.num_ranks, case.kind)
        if key not in self._stores:
            make = self._sliced if name == "tp" else self._chosen
            self._stores[key] = make(group, spread)
        if name == "tp":
            exchange: Exchange = Local(num_experts, group)
        else:
            exchange = make_exchange(name, spread, group, self.device, overlap=name == case.mode)
        return MoELayer(self._router, self._stores[key], self._backend, exchange=exchange)

    def _sliced(self, group: Group, spread: ExpertSpread) -> ResidentStore:
        """A part of every expert."""
        part, model_dim = group.shard(self._shape.hidden_dim), self._shape.model_dim
        store = self._store(spread.num_experts, ExpertShape(model_dim, part.length))
        gate, up = self._whole.weight("gate_up").chunk(2, dim=1)
        store.sink(None, "gate", gate[:, part.start : part.stop])
        store.sink(None, "up", up[:, part.start : part.stop])
        store.sink(None, "down", self._whole.weight("down")[:, :, part.start : part.stop])
        return store

    def _chosen(self, group: Group, spread: ExpertSpread) -> ResidentStore:
        """Whole experts."""
        experts = list(spread.experts_of(group.rank))
        store = self._store(len(experts), self._shape)
        store.records_EB.copy_(self._whole.records_EB[experts])
        return store


@dataclass(frozen=True)
class Times:
    """Microseconds of one run of the layer on this rank. Shares are taken of p10, which other processes disturb least."""

    p10: float
    median: float
    p90: float


def timed(call: Callable[[], object], group: Group, device: torch.device, as_graph: bool) -> Times:
    """A call runs the layer on NUM_INPUTS inputs. Ranks start every call together."""
    if as_graph:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    times = []
    for _ in range(WARM + REPEATS):
        group.smallest(0)
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
    ordered = sorted(us / NUM_INPUTS for us in times[WARM:])
    return Times(ordered[len(ordered) // 10], statistics.median(ordered), ordered[len(ordered) * 9 // 10])


def count_routes(layer: MoELayer, x_TD: torch.Tensor) -> int:
    """Routes that this rank computes."""
    routing = layer.backend.route(layer.router(x_TD), layer.router.rule)
    sent: Dispatched = layer.exchange.dispatch(x_TD, routing)
    parts = list(sent.parts)
    layer.exchange.combine(
        [torch.zeros_like(part.x_RD) for part in parts], sent
    )  # the collectives of the way back
    return sum(int((part.routing.ids_TK >= 0).sum()) for part in parts)


@torch.inference_mode()
def run_case(case: Case, layers: Layers, real: TorchGroup) -> dict[str, object]:
    """Check, measure, and sum up over ranks; the record of rank 0."""
    group, device, whole = RecordedGroup(real), layers.device, layers.whole
    layer = layers.layer(case, group)
    generator = torch.Generator(device).manual_seed(3)
    shape = (NUM_INPUTS, case.tokens_per_rank * case.num_ranks, SHAPES[case.shape][0])
    inputs = torch.randn(shape, generator=generator, device=device).to(layers.dtype)
    expected = whole(inputs[0]).float()
    error = float((layer(inputs[0]).float() - expected).abs().max() / expected.abs().max())
    allowed = TOLERANCE if case.format == "none" or case.mode != "tp" else 0.2  # a part has scales of its own
    assert error < allowed, f"{case}: off by {error:.3f}"
    routes = sum(count_routes(layer, x_TD) for x_TD in inputs)

    def measure(of: MoELayer) -> Times:
        as_graph = device.type == "cuda" and of.exchange.graph_safe and of.backend.graph_safe
        return timed(lambda: [of(x_TD) for x_TD in inputs], real, device, as_graph)

    total = measure(layer)
    group.set_mode("record")
    for x_TD in inputs:
        layer(x_TD)
    group.set_mode("replay")
    silent, alone = measure(layer), measure(whole)
    mine = [total.p10, silent.p10, alone.p10, total.median, total.p90, group.sent / NUM_INPUTS, routes]
    all_NX = real.all_gather(torch.tensor([mine], dtype=torch.float64, device=device))
    p10, computing, one_rank, median, p90 = (float(all_NX[:, i].max()) for i in range(5))  # slowest rank
    sent, routes_N = float(all_NX[:, 5].mean()), all_NX[:, 6]
    return {
        "case": f"{case.mode} N={case.num_ranks} M={case.tokens_per_rank} {case.shape} {case.format} {case.kind}",
        "backend": dist.get_backend(),
        "graph": device.type == "cuda" and layer.exchange.graph_safe and layer.backend.graph_safe,
        "us": round(median, 1),
        "p10": round(p10, 1),
        "p90": round(p90, 1),
        "p10_without_communication": round(computing, 1),
        "exposed": round(1 - computing / p10, 3),
        "p10_one_rank_with_all_experts": round(one_rank, 1),
        "efficiency": round(one_rank / (case.num_ranks * p10), 3),
        "bytes_sent_a_rank": int(sent),
        "balance": round(float(routes_N.max() / routes_N.mean()), 3),
        "error": round(error, 5),
    }


def run_rank(rank: int, place: Rendezvous, cases: Sequence[Case], args: argparse.Namespace) -> None:
    """What one process does. Cases are in the order of formats, whose layers are made once."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    url = f"tcp://{place.address}:{place.port}"
    dist.init_process_group(backend_for(device), init_method=url, rank=rank, world_size=place.size)
    group = TorchGroup(dist.group.WORLD, device)
    made, layers, done = "", None, 0
    found: Entry = {}
    for case in cases:
        if not group.smallest(time.monotonic() < args.deadline):
            break
        if layers is None or case.format != made:
            layers = None  # the last format's memory first
            made, layers = case.format, Layers(case.shape, case.format, device)
        record = run_case(case, layers, group)
        done += 1
        if case.mode in DISPATCHES and case.format == cases[0].format:
            found.setdefault(case.mode, {})[str(case.tokens_per_rank)] = float(str(record["us"]))
        if rank == 0:
            print(" | ".join(f"{name} {value}" for name, value in record.items()), flush=True)
            if not args.dry:
                append_record("parallel", record)
    if rank == 0 and done < len(cases):
        print(f"--time-limit {args.time_limit:g}: {len(cases) - done} of {len(cases)} cases were left out")
    if rank == 0 and args.write_record and device.type == "cuda":
        write_record(torch.cuda.get_device_name(device), place.size, found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--ranks", default="2", help="numbers of ranks, for example 2,4,8")
    parser.add_argument("--tokens", default="1,16,256", help="tokens a rank")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--format", default="none", help="expert formats, for example none,fp8")
    parser.add_argument("--kind", default="contiguous", choices=("contiguous", "round-robin"))
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="seconds after which no case is begun"
    )
    parser.add_argument(
        "--write-record",
        action="store_true",
        help="let --moe-ep-dispatch auto go by the first format's times",
    )
    parser.add_argument("--dry", action="store_true", help="write no record")
    args = parser.parse_args()
    args.deadline = time.monotonic() + args.time_limit  # of the machine's clock, which all ranks read
    for size in map(int, args.ranks.split(",")):
        cases = [
            Case(mode, size, tokens, args.shape, weights, args.kind)
            for weights in args.format.split(",")
            for tokens in map(int, args.tokens.split(","))
            for mode in args.modes.split(",")
        ]
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        place = Rendezvous(0, size, 0, "127.0.0.1", port)
        mp.spawn(run_rank, args=(place, cases, args), nprocs=size)


if __name__ == "__main__":
    main()
