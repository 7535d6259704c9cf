"""The layers around attention and experts at decode: kernels against torch, and products of few rows against cuBLAS.

    python benchmark/layers.py                       # every case, checked, then timed
    python benchmark/layers.py --only linear --rows 1,2,4,8
    python benchmark/layers.py --only kernels --tokens 1,64

Calls are captured in one CUDA graph that rotates over more weights than the L2 cache holds. A product is timed behind the
norm that feeds it, both ways: a dependent launch reads its first weights while the norm still runs, and a graph of products
alone would let each do so during the one before. Appends a line a case to benchmark/results/layers.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from minisgl.attention import AttentionBatch, AttentionProblem, LayerCache
from minisgl.attention.torch_sdpa import TorchAttention
from minisgl.core import SamplingParams
from minisgl.engine import sampler
from minisgl.engine.step import SampleSpec
from minisgl.layers import launch, norm
from minisgl.layers.attention import Attention
from minisgl.layers.launch import LinearTile
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeSpec, Rotary
from minisgl.moe.base import activate
from record import append_record, graph_us, hbm_bandwidth

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
ROTATED_BYTES = 256 * 2**20  # four times the L2 cache of an H200
PRODUCTS = {  # outputs, inputs
    "qwen3-30b-a3b qkv": (5120, 2048),
    "qwen3-30b-a3b out": (2048, 4096),
    "qwen3-30b-a3b router": (128, 2048),
    "qwen3-30b-a3b lm_head": (151_936, 2048),
}


def tiles(rows: int, in_dim: int) -> list[LinearTile]:
    """What is tried for a product of few rows."""
    vector = [
        *((4, 2048, 4), (8, 2048, 8), (8, 1024, 4), (2, 4096, 4), (4, 4096, 8)),
        *((4, 1024, 2), (4, 1024, 4), (2, 2048, 2), (16, 512, 4), (16, 1024, 8)),
    ]
    skinny = [(16, 256, 2, 4), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 4), (64, 128, 4, 4)]
    found = [LinearTile(False, *tile) for tile in vector if tile[1] <= in_dim and rows == 1]
    return found + [LinearTile(True, *tile) for tile in skinny if rows > 1]


def measure_product(name: str, rows: int, bandwidth: float, deadline: float) -> None:
    out_dim, in_dim = PRODUCTS[name]
    count = max(4, min(160, -(-ROTATED_BYTES // (2 * out_dim * in_dim)))) if out_dim < 50_000 else 1
    pool = torch.randn(count, out_dim, in_dim, device=CUDA, dtype=BF16)
    x = torch.randn(rows, in_dim, device=CUDA, dtype=BF16)
    layer = RMSNorm(in_dim, 1e-6, device=CUDA, dtype=BF16)
    layer.weight.fill_(1.0)
    normed = layer(x)
    expected = normed.double() @ pool[0].double().T

    def time_of(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        error = (product(normed, pool[0]).double() - expected).norm() / expected.norm()
        if not float(error) < 4e-3:
            raise RuntimeError(f"wrong result: {name}, {rows} rows: error {float(error)}")
        return graph_us([lambda w=w: product(layer(x), w) for w in pool]).median

    torch_us = time_of(lambda a, w: F.linear(a, w))
    found: list[tuple[float, LinearTile]] = []
    for tile in tiles(rows, in_dim):
        if time.monotonic() > deadline:
            break
        try:
            found.append((time_of(lambda a, w, tile=tile: launch.few_rows_linear(a, w, None, tile)), tile))
        except Exception as error:  # Triton raises its own types when a tile needs more than the device has
            print(f"{tile}: {type(error).__name__}: {str(error)[:100]}")
    found.sort(key=lambda entry: entry[0])
    floor_us = 2 * out_dim * in_dim / bandwidth * 1e6
    record = {
        "case": name,
        "rows": rows,
        "torch_us": round(torch_us, 2),
        "floor_us": round(floor_us, 2),
        "tiles": [{"us": round(us, 2), **dataclasses.asdict(tile)} for us, tile in found],
    }
    append_record("layers", record)
    print(f"{name:24} rows {rows}: floor {floor_us:6.1f}, torch {torch_us:6.1f}", end="")
    for us, tile in found[:4]:
        kind = "skinny" if tile.tensor_cores else "vector"
        print(
            f" | {us:6.1f} {kind} {tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}", end=""
        )
    print(flush=True)


def kernel_cases(tokens: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (torch, kernels) for one layer of Qwen3-30B-A3B."""
    problem = AttentionProblem(32, 4, 128, page_size=16, dtype=BF16, scale=1.0)
    layer = RMSNorm(2048, 1e-6, device=CUDA, dtype=BF16)
    heads = Attention(16, problem, TorchAttention(), qk_norm_eps=1e-6, device=CUDA)
    for parameter in itertools.chain(layer.parameters(), heads.parameters()):
        parameter.normal_()
    x, residual = torch.randn(2, tokens, 2048, device=CUDA, dtype=BF16)
    qkv = torch.randn(tokens, 5120, device=CUDA, dtype=BF16)
    positions = torch.arange(tokens, device=CUDA)
    rotation = Rotary(RopeSpec(128), CUDA)(positions, BF16)
    pools = torch.zeros(2, tokens, 16, 4, 128, device=CUDA, dtype=BF16)
    cache, one = LayerCache(pools[0], pools[1]), torch.ones(tokens, dtype=torch.int32, device=CUDA)
    batch = AttentionBatch(one, one, one[:, None], positions, 1, 1)
    gate_up = torch.randn(tokens, 2 * 3072, device=CUDA, dtype=BF16)
    logits = torch.randn(tokens, 151_936, device=CUDA) * 4
    greedy = [_spec(i, 0.0) for i in range(tokens)]

    def plain_heads() -> torch.Tensor:
        with patch.object(norm, "use_kernels", return_value=False):
            return heads.rotate_and_store(qkv, rotation, cache, batch)

    def plain_norm() -> torch.Tensor:
        with patch.object(norm, "use_kernels", return_value=False):
            return layer.add(x, residual)[0]

    def plain_sampler() -> torch.Tensor:
        with patch.object(sampler, "HAS_TRITON", False):
            return sampler.sample(logits, greedy).tokens_B

    return {
        "residual + norm": (plain_norm, lambda: layer.add(x, residual)[0]),
        "qk-norm, rotation, store": (
            plain_heads,
            lambda: launch.rotate_and_store(qkv, problem, heads.head_norms(), rotation, cache, positions),
        ),
        "silu and product": (
            lambda: activate(gate_up, "silu"),
            lambda: launch.gated_activation(gate_up, "silu"),
        ),
        "greedy choice": (plain_sampler, lambda: sampler.sample(logits, greedy).tokens_B),
    }


def _spec(seed: int, temperature: float) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature=temperature), seed, 5, [1], 1, frozenset())


def eager_us(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median microseconds of the device for a call that copies from the host, and so is no part of a graph."""
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(2_000_000)  # the host launches everything meanwhile
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]


def measure_kernels(tokens: int) -> None:
    for name, (plain, fused) in kernel_cases(tokens).items():
        if not torch.allclose(plain().float(), fused().float(), rtol=2e-2, atol=4e-2):
            raise RuntimeError(f"wrong result: {name}")
        report(name, tokens, graph_us([plain] * 20).median, graph_us([fused] * 20).median)
    logits, specs = torch.randn(tokens, 151_936, device=CUDA) * 4, [_spec(i, 0.8) for i in range(tokens)]
    fused_us = eager_us(lambda: sampler.sample(logits, specs))
    with patch.object(sampler, "HAS_TRITON", False):
        report("draw at a temperature", tokens, eager_us(lambda: sampler.sample(logits, specs)), fused_us)


def report(name: str, tokens: int, torch_us: float, kernel_us: float) -> None:
    times = {"torch_us": round(torch_us, 2), "kernel_us": round(kernel_us, 2)}
    append_record("layers", {"case": name, "tokens": tokens, **times})
    print(f"{name:26} tokens {tokens:3}: torch {torch_us:7.1f} us, kernel {kernel_us:7.1f} us", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("kernels", "linear"))
    parser.add_argument("--tokens", type=numbers, default="1,8,64", help="of the kernels' cases")
    parser.add_argument("--rows", type=numbers, default="1,2,4,8", help="of the products")
    parser.add_argument("--seconds", type=float, default=60.0, help="no tile is tried after this long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    deadline = time.monotonic() + options.seconds
    if options.only != "linear":
        for tokens in options.tokens:
            measure_kernels(tokens)
    if options.only != "kernels":
        bandwidth = hbm_bandwidth()
        for name, rows in itertools.product(PRODUCTS, options.rows):
            measure_product(name, rows, bandwidth, deadline)


if __name__ == "__main__":
    main()
