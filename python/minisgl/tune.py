"""`minisgl tune`: measure the fastest MoE kernels for a model's shape on this GPU, ahead of serving it.

Random weights and random routing of the model's shape, one layer, one token count a power of two. With --tensor-parallel-size
it is the shape of one rank's part of every expert, measured on one GPU (a rank of whole experts goes by what was measured with
all of them). What wins is written to the user's cache folder, where the fused backend finds it; `--moe-autotune` does the same
while serving, on the routes that occur.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track

from minisgl.models.experts import expert_shape
from minisgl.models.registry import resolve_model
from minisgl.models.spec import ModelSpec
from minisgl.moe.autotune import Tuner
from minisgl.moe.base import ExpertShape, Placement, Problem
from minisgl.moe.formats import get_format, moe_quantization_choices
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.kernels.precompile import CompilePool
from minisgl.moe.records import Records
from minisgl.moe.select import Choice, DeviceLimits
from minisgl.moe.store import ResidentStore

DEFAULT_TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--model-path", required=True, help="folder, hub id, or a bundled name")
    parser.add_argument("--model-source", default="huggingface", choices=("huggingface", "modelscope"))
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a hub model")
    parser.add_argument("--moe-expert-quantization", default="none", choices=moe_quantization_choices)
    parser.add_argument("--moe-quantization-group-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        default=1,
        help="ranks that share every expert's hidden units",
    )
    parser.add_argument(
        "--compile-workers", type=int, help="processes that compile (default: one a CPU, at most 16)"
    )
    parser.add_argument("--token-counts", default=DEFAULT_TOKENS, help=f"default {DEFAULT_TOKENS}")


def run_tune(args: argparse.Namespace) -> int:
    """Tune every token count and print what won. ValueError without a CUDA device or without experts."""
    if not torch.cuda.is_available():
        raise ValueError("tuning measures kernels on a CUDA device, and PyTorch sees none here")
    counts = parse_counts(args.token_counts)
    folder = resolve_model(args.model, args.model_source, args.revision, weights=False)
    spec = ModelSpec.from_folder(folder)
    if spec.moe is None:
        raise ValueError(f"{args.model} has no experts: there is nothing to tune")
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    weight_format = get_format(
        args.moe_expert_quantization, dtype, group_size=args.moe_quantization_group_size
    )
    store = ResidentStore(
        spec.moe.num_experts,
        part_of_rank(expert_shape(spec), args.tensor_parallel_size),
        weight_format,
        device,
    )
    store.fill_random(seed=0)
    limits, workers = DeviceLimits.of(device), args.compile_workers or min(16, os.cpu_count() or 1)
    pool = CompilePool(limits.capability[0] * 10 + limits.capability[1], workers)
    tuner = Tuner(limits, Records(Records.default_folder()), compile_ahead=pool.ahead)
    backend, console = FusedMoeBackend(tuner=tuner), Console()
    for count in track(counts, "tuning", console=console):
        console.print(f"{count} tokens: {tune_one(backend, store, spec, dtype, count)}", highlight=False)
    pool.close()
    return 0


def part_of_rank(shape: ExpertShape, num_ranks: int) -> ExpertShape:
    """What one of num_ranks tensor-parallel ranks holds of every expert. ValueError where F can't be shared."""
    if num_ranks < 1 or shape.hidden_dim % num_ranks:
        raise ValueError(
            f"--tensor-parallel-size {num_ranks} does not divide the experts' {shape.hidden_dim} hidden units"
        )
    return replace(shape, hidden_dim=shape.hidden_dim // num_ranks)


def parse_counts(text: str) -> list[int]:
    """Whole numbers of at least 1 from "1,4,16"; ValueError otherwise."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--token-counts {text!r}: give whole numbers, comma separated") from None
    if counts[0] < 1:
        raise ValueError(f"--token-counts {text!r}: give numbers of at least 1")
    return counts


@torch.inference_mode()
def tune_one(
    backend: FusedMoeBackend, store: ResidentStore, spec: ModelSpec, dtype: torch.dtype, num_tokens: int
) -> Choice:
    """Measure one token count on random rows and routes; returns the choice that the backend makes from then on."""
    assert spec.moe is not None
    device = store.device
    x_TD = torch.randn((num_tokens, spec.model_dim), device=device, dtype=dtype)
    logits_TE = torch.randn((num_tokens, spec.moe.num_experts), device=device, dtype=dtype)
    problem = Problem(
        num_tokens=num_tokens,
        top_k=spec.moe.rule.top_k,
        num_slots=store.num_experts,
        shape=store.shape,
        format=store.format.name,
        dtype=dtype,
        activation=spec.moe.activation,
        group_size=store.format.group_size,
    )
    routing = backend.route(logits_TE, spec.moe.rule)
    placement = Placement(store.slab, routing.ids_TK)
    backend.tune_if_wanted(problem, x_TD, routing, placement)
    return backend.choose(problem, device)
