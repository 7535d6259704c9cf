"""What the MoE benchmark runs: model shapes, routings, slabs of random experts, checks, and graph timing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.moe.base import Activation, ExpertShape, Placement, Problem, RoutingRule, Slab
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.torch_backend import TorchMoeBackend


@dataclass(frozen=True)
class ModelShape:
    """A model's MoE layer: E experts, K of them a token, D model dim, F expert hidden dim; its activation, and whether experts
    have biases."""

    num_experts: int
    top_k: int
    model_dim: int
    hidden_dim: int
    activation: Activation = "silu"
    bias: bool = False


SHAPES = {
    "qwen3-30b-a3b": ModelShape(128, 8, 2048, 768),
    "gpt-oss-20b": ModelShape(32, 4, 2880, 2880, "gpt_oss", bias=True),
    "mixtral-8x7b": ModelShape(8, 2, 4096, 14336),
    "deepseek-v2-lite": ModelShape(64, 6, 2048, 1408),
}

# LRU stack distances of Qwen3-30B-A3B's picks on real text: share of picks that lie within the n experts used last.
LOCALITY = ((0, 0.0), (8, 0.366), (24, 0.741), (49, 0.894), (81, 0.962), (128, 1.0))


def routing_logits(kind: str, num_tokens: int, shape: ModelShape, generator: torch.Generator) -> torch.Tensor:
    """Router logits float32 [T, E] on the CPU whose top-k is random, skewed (Zipf over experts) or local (real reuse)."""
    logits = torch.randn(num_tokens, shape.num_experts, generator=generator)
    if kind == "random":
        return logits
    if kind == "skewed":
        order = torch.randperm(shape.num_experts, generator=generator)
        return logits - torch.log(1.0 + order.float())
    if kind != "local":
        raise ValueError(f"routing {kind!r}: use random, local or skewed")
    recent = torch.randperm(shape.num_experts, generator=generator).tolist()
    for t in range(num_tokens):
        picks: list[int] = []
        while len(picks) < shape.top_k:
            u = float(torch.rand(1, generator=generator))
            distance = _stack_distance(u) * shape.num_experts / 128
            expert = recent[min(int(distance), shape.num_experts - 1)]
            if expert not in picks:
                picks.append(expert)
        recent = picks + [expert for expert in recent if expert not in picks]
        logits[t, picks] += 20.0
    return logits


def _stack_distance(u: float) -> float:
    for (low, p_low), (high, p_high) in itertools.pairwise(LOCALITY):
        if u <= p_high:
            return low + (high - low) * (u - p_low) / (p_high - p_low)
    return float(LOCALITY[-1][0])


def make_slab(
    shape: ModelShape, format_name: str, group: int, symmetric: bool, device: torch.device, seed: int
) -> Slab:
    """A slab of normal weights (0.02 standard deviation), quantized a few experts at a time."""
    weight_format = get_format(format_name, torch.bfloat16, group, symmetric)
    expert = ExpertShape(shape.model_dim, shape.hidden_dim, shape.bias)
    layout = weight_format.layout(expert)
    records = torch.empty((shape.num_experts, layout.nbytes), dtype=torch.uint8, device=device)
    slab = Slab.of_records(weight_format.name, expert, layout, records)
    generator = torch.Generator(device).manual_seed(seed)
    for first in range(0, shape.num_experts, 8):
        some = slice(first, min(first + 8, shape.num_experts))
        for name, dims in (
            ("gate_up", (2 * shape.hidden_dim, shape.model_dim)),
            ("down", (shape.model_dim, shape.hidden_dim)),
        ):
            count = some.stop - some.start
            weight = torch.randn((count, *dims), device=device, generator=generator) * 0.02
            for part, value in weight_format.quantize(name, weight).items():
                slab.parts[part][some].copy_(value)
            if shape.bias:
                bias = torch.randn((count, dims[0]), device=device, generator=generator) * 0.02
                slab.parts[f"{name}_bias"][some].copy_(bias)
    return slab


def other_slab(slab: Slab, shift: int) -> Slab:
    """The same experts elsewhere in memory, in another order: so that repeated runs don't find weights in the L2."""
    return Slab.of_records(slab.format, slab.shape, slab.layout, slab.records_SB.roll(shift, 0))


@dataclass
class LayerCase:
    """One benchmark case: enough sets of weights, rows and logits that no cache holds them all."""

    problem: Problem
    rule: RoutingRule
    slabs: list[Slab]
    x: list[torch.Tensor]
    logits: list[torch.Tensor]

    def touched_bytes(self) -> float:
        """Bytes of the experts that a step reads at least, averaged over the sets."""
        nbytes = (
            sum(p.numel() * p.element_size() for p in self.slabs[0].parts.values()) / self.slabs[0].num_slots
        )
        counts = [self.distinct(logits) for logits in self.logits]
        return nbytes * sum(counts) / len(counts)

    def distinct(self, logits: torch.Tensor) -> int:
        return int(logits.topk(self.rule.top_k, dim=-1).indices.unique().numel())

    def flops(self) -> float:
        shape = self.problem.shape
        return 6.0 * self.problem.num_tokens * self.rule.top_k * shape.model_dim * shape.hidden_dim


def make_case(
    shape: ModelShape, num_tokens: int, slabs: list[Slab], routing: str, group: int, seed: int
) -> LayerCase:
    slab, device = slabs[0], slabs[0].records_SB.device
    problem = Problem(
        num_tokens=num_tokens,
        top_k=shape.top_k,
        num_slots=slab.num_slots,
        shape=slab.shape,
        format=slab.format,
        dtype=torch.bfloat16,
        activation=shape.activation,
        group_size=group,
    )
    generator = torch.Generator().manual_seed(seed)
    x = [
        torch.randn(num_tokens, shape.model_dim, generator=generator).to(device, torch.bfloat16)
        for _ in slabs
    ]
    logits = [routing_logits(routing, num_tokens, shape, generator).to(device) for _ in slabs]
    return LayerCase(problem, RoutingRule(shape.top_k), slabs, x, logits)


def run_layer(backend: FusedMoeBackend | TorchMoeBackend, case: LayerCase, index: int) -> torch.Tensor:
    """The whole layer: router logits and rows to output."""
    routing = backend.route(case.logits[index], case.rule)
    step = backend.begin(case.x[index], routing, case.problem)
    step.run(Placement(case.slabs[index], routing.ids_TK))
    return step.finish()


def layer_error(backend: FusedMoeBackend, case: LayerCase) -> float:
    """Relative error of the last set's output against the definition, in a buffer of NaN before."""
    index = len(case.slabs) - 1
    expected = run_layer(TorchMoeBackend(), case, index).double()
    backend.workspace(case.x[0].device).poison(0x7F)
    actual = run_layer(backend, case, index).double()
    error = float((actual - expected).norm() / expected.norm())
    return error if error == error else float("inf")


@dataclass(frozen=True)
class GraphTiming:
    """Microseconds of one layer: median, and the 10th and 90th percentile over replays."""

    median: float
    p10: float
    p90: float


def time_graph(call: Callable[[int], object], num_sets: int, replays: int = 30) -> GraphTiming:
    """Capture call(0) .. call(num_sets - 1) in one CUDA graph and time its replays, per call."""
    for index in range(num_sets):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_sets):
            call(index)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_sets)
    times.sort()
    return GraphTiming(statistics.median(times), times[replays // 10], times[-1 - replays // 10])


@triton.jit
def _read_kernel(source, sink, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total ^= tl.load(source + start + tl.arange(0, BLOCK))
    tl.store(sink + tl.program_id(0), tl.sum(total, 0))


def measured_bandwidth(device: torch.device) -> float:
    """Bytes a second that a plain kernel reads from device memory."""
    source = torch.ones(1 << 30, dtype=torch.int32, device=device)
    sink = torch.empty(4096, dtype=torch.int32, device=device)
    timing = time_graph(
        lambda _: _read_kernel[(1056,)](source, sink, source.numel(), 4096, num_warps=8), 1, 10
    )
    return source.numel() * 4 / timing.p10 * 1e6
