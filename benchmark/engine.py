"""Throughput and latency of the whole engine, for a model or for random weights of a real shape.

    python benchmark/engine.py --model demo
    python benchmark/engine.py --shape qwen3-30b-a3b --batch 1,8,64,256

Prints one row a batch size: time to compute the prompts, time of a decode step (median), tokens/s, and beside it the time that
reading the active weights and the KV cache once would take at the bandwidth measured in the same run. Appends a JSON line to
benchmark/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from minisgl import LLM, SamplingParams
from minisgl.core import Request
from minisgl.models.sizes import expert_params, kv_bytes_per_token, num_dense_params
from minisgl.models.spec import ModelSpec
from record import append_record, hbm_bandwidth

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}


def shape_folder(name: str, layers: int | None) -> Path:
    """A folder that holds only the config.json of a real shape."""
    if name not in SHAPES:
        raise SystemExit(f"unknown shape {name!r}: use one of {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if layers:
        config["num_hidden_layers"] = layers
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bytes_per_step(spec: ModelSpec, batch: int, context: int, itemsize: int) -> float:
    """Bytes a decode step must read at least: dense weights once, each distinct expert once (random routing), the KV cache.

    The embedding is gathered, not read; a tied one is read as the head.
    """
    dense = num_dense_params(spec) - (0 if spec.tie_embeddings else spec.vocab_size * spec.model_dim)
    experts = 0.0
    if spec.moe is not None:
        num, top_k = spec.moe.num_experts, spec.moe.rule.top_k
        distinct = num * (1 - (1 - top_k / num) ** batch)
        experts = distinct * expert_params(spec) * len(spec.moe.sparse_layers)
    return (dense + experts) * itemsize + batch * context * kv_bytes_per_token(spec, itemsize)


def measure(llm: LLM, batch: int, num_input: int, num_output: int) -> dict[str, float]:
    """Seconds of prompt and of the median decode step, for `batch` random prompts that share nothing."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, llm.engine.vocab_size, (batch, num_input), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.scheduler.add(Request(f"bench-{batch}-{i}", tuple(prompt), params))
    started, waiting = set(), time.perf_counter()
    while len(started) < batch:
        started |= {output.request_id for output in llm.scheduler.step() if output.token_id is not None}
    prefill = time.perf_counter() - waiting
    steps, at = [], time.perf_counter()
    while llm.scheduler.has_work:
        outputs = llm.scheduler.step()
        now = time.perf_counter()
        if len(outputs) == batch and not any(o.finish_reason for o in outputs):
            steps.append(now - at)
        at = now
    return {
        "prefill_s": prefill,
        "step_s": statistics.median(steps),
        "p90_s": sorted(steps)[int(len(steps) * 0.9)],
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    model = str(shape_folder(args.shape, args.layers)) if args.shape else args.model
    console = Console(stderr=args.json)
    batches = [int(b) for b in args.batch.split(",")]
    options: dict[str, Any] = {"dummy_weight": bool(args.shape), "moe_expert_quantization": args.quantization}
    if args.device == "cpu" or not torch.cuda.is_available():
        options |= {"num_pages": max(batches) * (args.input + args.output) // 16 + 200}
    if args.tp > 1:
        options |= {"tensor_parallel_size": args.tp, "expert_parallel_size": args.ep}
        options |= {"moe_ep_dispatch": args.dispatch} if args.ep > 1 else {}
    start = time.perf_counter()
    llm = LLM(model, device=args.device, max_running_requests=max(batches), **options)
    loaded = time.perf_counter() - start
    if not args.json:
        console.print(llm.engine.ledger().table())
    bandwidth = hbm_bandwidth() if llm.engine.device.type == "cuda" else None
    rows = []
    measure(llm, min(batches), args.input, min(args.output, 16))  # kernels compile at their first call
    for batch in batches:
        row: dict[str, Any] = {"batch": batch, **measure(llm, batch, args.input, args.output)}
        moved = bytes_per_step(
            llm.engine.spec, batch, args.input + args.output // 2, torch.finfo(llm.engine.dtype).bits // 8
        )
        row["bound_s"] = moved / bandwidth if bandwidth else None
        rows.append(row)
    table = Table(
        "batch", "prompt s", "prompt tok/s", "step ms", "p90 ms", "tok/s", "HBM bound ms", "of bound"
    )
    for row in rows:
        bound = row["bound_s"]
        table.add_row(
            str(row["batch"]),
            f"{row['prefill_s']:.3f}",
            f"{row['batch'] * args.input / row['prefill_s']:,.0f}",
            f"{row['step_s'] * 1e3:.2f}",
            f"{row['p90_s'] * 1e3:.2f}",
            f"{row['batch'] / row['step_s']:,.0f}",
            f"{bound * 1e3:.2f}" if bound else "-",
            f"{bound / row['step_s']:.0%}" if bound else "-",
        )
    console.print(table)
    record = {
        "case": {k: v for k, v in vars(args).items() if k != "json"},
        "load_s": loaded,
        "hbm_bytes_per_s": bandwidth,
        "rows": rows,
    }
    append_record("engine", record)
    llm.close()
    if args.json:
        print(json.dumps(record))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="model to load (default demo)")
    parser.add_argument("--shape", help=f"random weights of a real shape instead: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="fewer layers than the real shape has")
    parser.add_argument("--quantization", default="none", help="expert format")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp", type=int, default=1, help="ranks; their bound is that of one GPU")
    parser.add_argument("--ep", type=int, default=1, help="1, or --tp for whole experts a rank")
    parser.add_argument("--dispatch", default="auto", help="as --moe-ep-dispatch")
    parser.add_argument("--batch", default="1,8", help="batch sizes, comma separated")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="new tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
