"""How long a token and a prompt take, from bytes and bandwidths. A model of what bounds a step, not a simulation.

    decode   reading dense weights, the KV cache and K experts a layer; misses travel over the link while hits are computed
    prefill  every expert the chunk touches is read once; matrix products; experts that are not resident cross the link once

Constants are measurements on an H200 with a record in benchmark/results: `source` names a line of limits.jsonl, or a file
and the time of its line. docs/planner.md says what the model leaves out. Rejected: fitting one efficiency a GPU. It hides what
a card is bound by, and nobody can check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from minisgl.engine.memory import Setup, captured_batches, expert_cache_bytes
from minisgl.models.sizes import ModelSizes
from minisgl.planner.machine import DataSheetShares, Machine

H200_READ_TBPS, H200_READ_SHEET_TBPS = 4.43, 4.8  # source: hbm-read
H200_MATMUL_TFLOPS, H200_MATMUL_SHEET_TFLOPS = 766.0, 989.0  # source: matmul-bf16
LINK_COPY_GBPS, LINK_SHEET_GBPS = 54.9, 63.0  # source: pinned-h2d
LINK_KERNEL_GBPS = 50.5  # source: pinned-read-in-graph
HOST_COPY_GBPS = 5.2  # source: host-copy
LAUNCH_US = 11.0  # source: triton-launch
CPU_LAYER_US = 800.0  # source: cpu-decode-layer

# One MoE layer of Qwen3-30B-A3B, one token, and the bandwidth of the same run. source: moe.jsonl 2026-11-30T00:17:40+00:00
MOE_LAYER_US = {"none": 22.7, "fp8": 15.69, "int8": 16.05, "int4": 12.63}
MOE_RUN_TBPS = 4.525
MOE_LAYER_BYTES = {
    "none": 8 * 9_437_184,
    "fp8": 8 * 4_732_928,
    "int8": 8 * 4_732_928,
    "int4": 8 * 2_506_752,
}
# The same layer for 4096 tokens, in TFLOP/s. source: moe.jsonl 2026-11-30T00:17:40+00:00
MOE_PREFILL_TFLOPS = {"none": 485.4, "fp8": 700.3, "int8": 404.1, "int4": 346.3}
# A decode step of that model at batch 1, bf16, all resident, and its bound: weights and KV once, at the bandwidth of the run.
# source: decode-step
STEP_MS, STEP_BOUND_MS, STEP_LAYERS = 2.485, 1.443, 48
# What a layer that misses takes beyond its bytes: planning, the first bytes' way, and what is computed after the last ones.
# source: offloaded-decode
MISS_US = 24.0
EAGER_LAUNCHES = (
    16  # a layer, counted in layers/ and moe/: norms, products, attention, router, two waves of experts
)

SHARES = DataSheetShares(
    read=H200_READ_TBPS / H200_READ_SHEET_TBPS,
    matmul=H200_MATMUL_TFLOPS / H200_MATMUL_SHEET_TFLOPS,
    link=LINK_COPY_GBPS / LINK_SHEET_GBPS,
)
LINK_KERNEL_SHARE = LINK_KERNEL_GBPS / LINK_COPY_GBPS

LOCAL_HITS = ((0, 0.0), (8, 0.366), (24, 0.741), (49, 0.894), (81, 0.962), (128, 1.0))
"""LRU hit rate of one layer of Qwen3-30B-A3B (128 experts, top-8) on real text, by slots. source: local-routing"""
LOCAL_EXPERTS = 128
ANSWER_TOKENS = 256  # of the answer by whose time set-ups are compared


@dataclass(frozen=True)
class Speed:
    """decode_ms: milliseconds a token at batch 1. prefill_s: seconds until a prompt is computed. hit_rate: share of routes
    whose expert is resident.
    """

    decode_ms: float
    prefill_s: float
    hit_rate: float = 1.0

    @property
    def answer_s(self) -> float:
        """Seconds from the prompt to the end of an answer of ANSWER_TOKENS tokens: what set-ups are compared by."""
        return self.prefill_s + ANSWER_TOKENS * self.decode_ms / 1e3


def local_hit_rate(num_slots: int, num_experts: int, top_k: int) -> float:
    """Share of routes that find their expert in an LRU cache of `num_slots` a layer, for text: linear between LOCAL_HITS.

    Other numbers of experts are scaled to 128 by the share of experts that have a slot, which is an assumption. Fewer slots
    than a token uses can't hit: each step evicts what the next one needs.
    """
    if num_slots >= num_experts:
        return 1.0
    if num_slots < top_k:
        return 0.0
    at = num_slots * LOCAL_EXPERTS / num_experts
    for (x0, y0), (x1, y1) in pairwise(LOCAL_HITS):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return 1.0


def random_hit_rate(num_slots: int, num_experts: int, top_k: int) -> float:
    """The same for routing without any locality, the worst case: S / E."""
    return 0.0 if num_slots < top_k else min(1.0, num_slots / num_experts)


def nearest_measured(weight_format: str) -> str:
    """The expert format with a measurement that stands for this one: the one with as many bits."""
    four_bits = {"int4_asym", "mxfp4"}
    return "int4" if weight_format in four_bits else weight_format if weight_format in MOE_LAYER_US else "fp8"


def launch_us(weight_format: str) -> tuple[float, float]:
    """Microseconds a layer that don't scale with bytes, on a GPU: (MoE, all else).

    MoE: a measured layer less the time of reading its K records at the bandwidth of that run. All else (norms, attention's
    launches, products of one row that read below bandwidth, the step's own launches): a measured decode step less its bound,
    a layer, less the MoE part. In bf16 6.0 and 15.7 us.
    """

    def moe(name: str) -> float:
        return MOE_LAYER_US[name] - MOE_LAYER_BYTES[name] / (MOE_RUN_TBPS * 1e6)

    other = (STEP_MS - STEP_BOUND_MS) * 1e3 / STEP_LAYERS - moe("none")
    return moe(nearest_measured(weight_format)), other


def kv_read_bytes(sizes: ModelSizes, setup: Setup, context: int) -> int:
    """Bytes of keys and values a token at position `context` reads: windowed layers read their window only."""
    lengths = (context if window is None else min(context, window) for window in sizes.windows_L)
    return sum(entry * n for entry, n in zip(sizes.kv_elements_L, lengths)) * setup.dtype.itemsize


def dense_read_bytes(sizes: ModelSizes, setup: Setup) -> int:
    """Bytes of dense weights one step reads: all, less an embedding of which only single rows are looked up."""
    on_device = not (sizes.tied or setup.storage.embedding_on_host)
    looked_up = sizes.params["embedding"] * setup.dtype.itemsize if on_device else 0
    return sizes.dense_bytes(setup.dtype, setup.storage) - looked_up


def cpu_dequantize_bytes(sizes: ModelSizes, setup: Setup) -> int:
    """Bytes the torch backend moves beside a stored expert to use it once: a float32 copy is written and read again. None
    where float32 is what is stored.
    """
    as_it_is = setup.weight_format == "none" and setup.dtype.itemsize == 4
    return 0 if as_it_is else 8 * sizes.params_per_expert


def decode_ms(sizes: ModelSizes, setup: Setup, machine: Machine, context: int, hit_rate: float) -> float:
    """Milliseconds a token at batch 1 with `context` tokens before it.

    (dense + KV bytes) / bandwidth + launches, then the experts: hits are computed while misses cross the link, and a layer that
    misses at all takes MISS_US more. Where the host plans, misses are a wave with launches of its own, after they have come.
    Steps that no CUDA graph holds pay their launches from Python. Within 8 % of what offloaded steps were measured to take
    (`offloaded-decode`).
    """
    record = sizes.record_bytes(setup.weight_format, setup.dtype, setup.group_size)
    routed = sizes.num_sparse * sizes.top_k * record
    missed = routed * (1.0 - hit_rate)
    dense = dense_read_bytes(sizes, setup) + kv_read_bytes(sizes, setup, context)
    if not setup.on_cuda:
        routed += sizes.num_sparse * sizes.top_k * cpu_dequantize_bytes(sizes, setup)
        moved = dense + routed + 2 * missed  # a miss is read and written once more
        return moved / machine.host_read_gbps / 1e6 + sizes.num_layers * CPU_LAYER_US / 1e3
    moe_us, other_us = launch_us(setup.weight_format)
    if 1 not in captured_batches(sizes, setup):
        other_us += EAGER_LAUNCHES * LAUNCH_US
    dense_ms = dense / machine.read_gbps / 1e6 + sizes.num_layers * other_us / 1e3
    hits_ms = (routed - missed) / machine.read_gbps / 1e6 + sizes.num_sparse * moe_us / 1e3
    link_ms = missed / miss_gbps(sizes, setup, machine) / 1e6 if missed else 0.0
    if not setup.offloaded:
        return dense_ms + hits_ms
    misses_ms = (missed / machine.read_gbps / 1e6 + sizes.num_sparse * moe_us / 1e3) * setup.staged
    some_miss = 1.0 - hit_rate**sizes.top_k  # of the layers, if picks were independent
    return dense_ms + max(hits_ms, link_ms) + misses_ms + sizes.num_sparse * some_miss * MISS_US / 1e3


def miss_gbps(sizes: ModelSizes, setup: Setup, machine: Machine) -> float:
    """GB/s at which missing experts come: kernels that read pinned memory, or, where the host plans, the copy engine for what
    is pinned and one thread of the host before it for the rest.
    """
    if not setup.staged:
        return machine.link_gbps * LINK_KERNEL_SHARE
    everything = expert_cache_bytes(sizes, setup, sizes.num_experts)
    pinned = min(1.0, machine.pinnable_bytes / everything) if everything else 1.0
    return 1.0 / (pinned / machine.link_gbps + (1.0 - pinned) / min(machine.link_gbps, HOST_COPY_GBPS))


def prefill_seconds(sizes: ModelSizes, setup: Setup, machine: Machine, num_tokens: int) -> float:
    """Seconds to compute a prompt in chunks of `setup.step_tokens`; experts without a slot cross the link once a chunk."""
    seconds, done = 0.0, 0
    while done < num_tokens:
        length = min(setup.step_tokens, num_tokens - done)
        seconds += _chunk_seconds(sizes, setup, machine, done, length)
        done += length
    return seconds


def _chunk_seconds(sizes: ModelSizes, setup: Setup, machine: Machine, start: int, length: int) -> float:
    record = sizes.record_bytes(setup.weight_format, setup.dtype, setup.group_size)
    touched = 0.0
    if sizes.num_experts:
        touched = sizes.num_experts * (1 - (1 - sizes.top_k / sizes.num_experts) ** length)
    bytes_read = dense_read_bytes(sizes, setup) + sizes.num_sparse * touched * record
    multiplied = sizes.dense_params - sizes.params["embedding"] - sizes.params["head"]
    attended = 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim * length * (start + length / 2)
    dense_flops = 2 * length * multiplied + attended
    moe_flops = 2 * length * sizes.num_sparse * sizes.top_k * sizes.params_per_expert
    if not setup.on_cuda:
        bytes_read += sizes.num_sparse * touched * cpu_dequantize_bytes(sizes, setup)
        compute = (dense_flops + moe_flops) / machine.host_tflops / 1e12
        return max(compute, bytes_read / machine.host_read_gbps / 1e9) + sizes.num_layers * CPU_LAYER_US / 1e6
    moe_us, other_us = launch_us(setup.weight_format)
    share = MOE_PREFILL_TFLOPS[nearest_measured(setup.weight_format)] / H200_MATMUL_TFLOPS
    compute = (dense_flops + moe_flops / share) / machine.tflops / 1e12
    on_device = (
        max(compute, bytes_read / machine.read_gbps / 1e9) + sizes.num_layers * (moe_us + other_us) / 1e6
    )
    slots = sizes.num_experts if setup.num_slots is None else setup.num_slots
    absent = touched * (1 - slots / sizes.num_experts) if sizes.num_experts else 0.0
    if not absent:
        return on_device
    rate = miss_gbps(sizes, setup, machine) if setup.staged else machine.link_gbps  # of the copy engine
    return max(on_device, sizes.num_sparse * absent * record / rate / 1e9)


def predict_speed(
    sizes: ModelSizes, setup: Setup, machine: Machine, context: int, prompt: int, local: bool = True
) -> Speed:
    """Speed of a set-up on a machine. local: hit rate of routing as text has it; False is the random worst case."""
    hits = 1.0
    if sizes.num_experts and setup.num_slots is not None:
        rate = local_hit_rate if local else random_hit_rate
        hits = rate(setup.num_slots, sizes.num_experts, sizes.top_k)
    return Speed(
        decode_ms(sizes, setup, machine, context, hits), prefill_seconds(sizes, setup, machine, prompt), hits
    )
