"""One MoE layer over several ranks: time, bytes sent, balance and exposed communication of every way to dispatch.

    python benchmark/parallel.py                                               # CPU ranks over Gloo, a small layer
    python benchmark/parallel.py --device cuda --shape qwen3-30b-a3b --ranks 2,4 --tokens 1,16,64,256,4096 --format none,fp8

Every case is checked first: all ranks against a layer that holds every expert. Exposed communication is the time of the layer
less that of the same work with every collective replaced by its recorded result, so what overlaps is not counted. On CUDA,
layers that a graph can hold are timed as graphs; NVLink multicast is left off. Appends a line a case to
benchmark/results/parallel.jsonl.
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
from minisgl.moe.exchange import Dispatched, Exchange, Local, make_exchange
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


def make_layers(case: Case, group: RecordedGroup, device: torch.device) -> tuple[MoELayer, MoELayer]:
    """(this rank's layer, one with every expert), of the same weights."""
    model_dim, hidden_dim, num_experts, top_k = SHAPES[case.shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights, backend = get_format(case.format, dtype), make_backend("auto", device)
    router = Router(num_experts, model_dim, RoutingRule(top_k), device=device, dtype=dtype)
    router.weight.normal_(0.0, model_dim**-0.5, generator=torch.Generator(device).manual_seed(1))
    whole = ResidentStore(num_experts, ExpertShape(model_dim, hidden_dim), weights, device)
    whole.fill_random(seed=2, std=model_dim**-0.5)
    if case.mode == "tp":
        part = group.shard(hidden_dim)
        store = ResidentStore(num_experts, ExpertShape(model_dim, part.length), weights, device)
        gate, up = whole.weight("gate_up").chunk(2, dim=1)
        store.sink(None, "gate", gate[:, part.start : part.stop])
        store.sink(None, "up", up[:, part.start : part.stop])
        store.sink(None, "down", whole.weight("down")[:, :, part.start : part.stop])
        exchange: Exchange = Local(num_experts, group)
    else:
        spread = ExpertSpread(num_experts, case.num_ranks, case.kind)  # type: ignore[arg-type]
        experts = list(spread.experts_of(group.rank))
        store = ResidentStore(len(experts), ExpertShape(model_dim, hidden_dim), weights, device)
        store.records_EB.copy_(whole.records_EB[experts])
        name, _, rest = case.mode.partition("-")
        exchange = make_exchange(name, spread, group, device, overlap=not rest)
    return MoELayer(router, store, backend, exchange=exchange), MoELayer(router, whole, backend)


def timed(call: Callable[[], object], group: Group, device: torch.device, as_graph: bool) -> float:
    """Median microseconds on this rank; ranks start every call together."""
    if as_graph:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    times = []
    for _ in range(25):
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
    return statistics.median(times[5:])


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
def run_case(case: Case, real: TorchGroup, device: torch.device) -> dict[str, object]:
    """Check, measure, and sum up over ranks; the record of rank 0."""
    group = RecordedGroup(real)
    layer, whole = make_layers(case, group, device)
    generator = torch.Generator(device).manual_seed(3)
    shape = (case.tokens_per_rank * case.num_ranks, SHAPES[case.shape][0])
    x_TD = torch.randn(shape, generator=generator, device=device).to(layer.router.weight.dtype)
    expected = whole(x_TD).float()
    error = float((layer(x_TD).float() - expected).abs().max() / expected.abs().max())
    assert error < (TOLERANCE if case.format == "none" or case.mode != "tp" else 0.2), (
        f"{case}: off by {error:.3f}"
    )
    routes = count_routes(layer, x_TD)
    as_graph = device.type == "cuda" and layer.exchange.graph_safe and layer.backend.graph_safe
    total = timed(lambda: layer(x_TD), real, device, as_graph)
    group.set_mode("record")
    layer(x_TD)
    group.set_mode("replay")
    silent = timed(lambda: layer(x_TD), real, device, as_graph)
    alone = timed(lambda: whole(x_TD), real, device, as_graph)
    mine = torch.tensor([[total, silent, alone, group.sent, routes]], dtype=torch.float32, device=device)
    all_NX = real.all_gather(mine)
    slowest, computing, one_rank = all_NX[:, 0].max(), all_NX[:, 1].max(), all_NX[:, 2].max()
    return {
        "case": f"{case.mode} N={case.num_ranks} M={case.tokens_per_rank} {case.shape} {case.format} {case.kind}",
        "backend": dist.get_backend(),
        "graph": as_graph,
        "us": round(float(slowest), 1),
        "us_without_communication": round(float(computing), 1),
        "exposed": round(1 - float(computing / slowest), 3),
        "us_one_rank_with_all_experts": round(float(one_rank), 1),
        "bytes_sent_a_rank": int(all_NX[:, 3].mean()),
        "balance": round(float(all_NX[:, 4].max() / all_NX[:, 4].mean()), 3),
        "error": round(error, 5),
    }


def run_rank(rank: int, place: Rendezvous, cases: Sequence[Case], args: argparse.Namespace) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    url = f"tcp://{place.address}:{place.port}"
    dist.init_process_group(backend_for(device), init_method=url, rank=rank, world_size=place.size)
    group = TorchGroup(dist.group.WORLD, device)
    for case in cases:
        record = run_case(case, group, device)
        if rank == 0:
            print(" | ".join(f"{name} {value}" for name, value in record.items()), flush=True)
            if not args.dry:
                append_record("parallel", record)
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
    parser.add_argument("--dry", action="store_true", help="write no record")
    args = parser.parse_args()
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
