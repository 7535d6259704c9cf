"""Throughput and latency of the whole engine, for a model or for random weights of a real shape.

    python benchmark/engine.py --model demo
    python benchmark/engine.py --shape qwen3-30b-a3b --batch 1,8,64,256
    python benchmark/engine.py --shape qwen3-30b-a3b --prefill 8192 --profile trace.json.gz
    python benchmark/engine.py --shape qwen3-30b-a3b --layers 12 --compare transformers
    python benchmark/engine.py --shape qwen3-30b-a3b --batch 1,64,256 --prefill 8192 --tp 2 --ep 2 --scaling

Prints one row a batch size: time to compute the prompts, time of a decode step (median), tokens/s, and beside it the time that
reading the active weights and the KV cache once would take at the bandwidth measured in the same run. Appends a JSON line to
benchmark/results/engine.jsonl. --prefill times one prompt beside the bf16 peak of the same run; --profile says where decode
steps of the first batch size spend their time; --compare runs transformers on the same shape afterwards, in its own process.
--scaling measures one rank before the N of --tp: their efficiency is its time against N times theirs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_peer import best_steps, run_apart
from engine_profile import profile_steps
from minisgl import LLM, SamplingParams
from minisgl.core import Request
from minisgl.models.sizes import expert_params, kv_bytes_per_token, num_dense_params
from minisgl.models.spec import ModelSpec
from record import append_record, bf16_peak, hbm_bandwidth

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
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
        "model_type": "qwen3_moe",
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


def flops_of_prompt(spec: ModelSpec, num_tokens: int) -> float:
    """Multiplications and additions of one prompt: active weights times tokens, causal attention, logits of one token."""
    heads = spec.vocab_size * spec.model_dim
    weights = num_dense_params(spec) - (1 if spec.tie_embeddings else 2) * heads
    if spec.moe is not None:
        weights += spec.moe.rule.top_k * expert_params(spec) * len(spec.moe.sparse_layers)
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    return 2 * (weights * num_tokens + heads) + attention


def add_requests(llm: LLM, name: str, batch: int, num_input: int, num_output: int) -> None:
    """Random prompts that share nothing, also not with those of another name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    prompts = torch.randint(0, llm.engine.vocab_size, (batch, num_input), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.scheduler.add(Request(f"bench-{name}-{i}", tuple(prompt), params))


def run_prompts(llm: LLM, batch: int) -> float:
    """Seconds until each of the requests that were added has its first token."""
    started, waiting = set(), time.perf_counter()
    while len(started) < batch:
        started |= {output.request_id for output in llm.scheduler.step() if output.token_id is not None}
    return time.perf_counter() - waiting


def finish(llm: LLM) -> None:
    while llm.scheduler.has_work:
        llm.scheduler.step()


def measure(llm: LLM, name: str, batch: int, num_input: int, num_output: int) -> dict[str, float]:
    """Seconds of prompt and of the median decode step, for `batch` requests."""
    add_requests(llm, name, batch, num_input, num_output)
    prefill = run_prompts(llm, batch)
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


def measure_prompt(llm: LLM, num_tokens: int, peak: float | None, repeats: int = 4) -> dict[str, Any]:
    """Median seconds of one prompt, the first run not counted, and its share of the bf16 peak (FLOP/s)."""
    times = []
    for n in range(repeats):
        add_requests(llm, f"prompt-{n}", 1, num_tokens, 2)
        times.append(run_prompts(llm, 1))
        finish(llm)
    seconds, flops = statistics.median(times[1:]), flops_of_prompt(llm.engine.spec, num_tokens)
    share = None if peak is None else 100 * flops / seconds / peak
    return {
        "tokens": num_tokens,
        "seconds": seconds,
        "tflops": flops / seconds / 1e12,
        "bf16_peak": peak,
        "percent_of_peak": share,
    }


def profile(llm: LLM, batch: int, num_input: int, path: Path, num_steps: int = 24) -> dict[str, Any]:
    """Decode steps of `batch` requests under the profiler; prints the breakdown."""
    add_requests(llm, "profile", batch, num_input, num_steps + 16)
    run_prompts(llm, batch)
    for _ in range(6):
        llm.scheduler.step()
    found = profile_steps(llm.scheduler.step, num_steps, path)
    finish(llm)
    Console(stderr=True, width=140).print(found.table())
    return {"batch": batch, **found.record()}


def compare(args: argparse.Namespace, model: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """transformers on the same shape; adds its step to our rows. The engine must have given its memory back."""
    options = ["--config", model, "--batch", args.batch, "--input", str(args.input)]
    options += ["--output", str(min(args.output, 48)), "--device", args.device]
    if args.device == "auto":
        options[-1] = "cuda" if torch.cuda.is_available() else "cpu"
    if options[-1] == "cpu":
        options += ["--dtype", "float32"]
    found = run_apart(options, args.compare_seconds)
    steps = best_steps(found)
    for row in rows:
        row["transformers_step_s"] = steps.get(row["batch"])
    return found


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM."""
    batches = [int(b) for b in args.batch.split(",")]
    options: dict[str, Any] = {"dummy_weight": bool(args.shape), "moe_expert_quantization": args.quantization}
    options |= {"device": args.device, "max_running_requests": max(batches)}
    if args.device == "cpu" or not torch.cuda.is_available():
        options |= {"num_pages": (max(batches) * (args.input + args.output) + args.prefill) // 16 + 200}
    if args.gpu_memory_limit:
        options |= {"gpu_memory_limit": args.gpu_memory_limit}
    if args.tp > 1:
        options |= {"tensor_parallel_size": args.tp, "expert_parallel_size": args.ep}
        options |= {"moe_ep_dispatch": args.dispatch} if args.ep > 1 else {}
    return options


def measure_engine(args: argparse.Namespace, model: str, console: Console) -> dict[str, Any]:
    """Everything that our engine is asked for, as a record; the engine is closed at the end."""
    batches = [int(b) for b in args.batch.split(",")]
    start = time.perf_counter()
    llm = LLM(model, **options_of(args))
    record: dict[str, Any] = {"load_s": time.perf_counter() - start}
    ledger = llm.engine.ledger()
    record["ledger"] = {line.name: line.num_bytes for line in ledger.lines}
    console.print(ledger.table())
    on_cuda = llm.engine.device.type == "cuda"
    bandwidth = hbm_bandwidth() if on_cuda and not args.gpu_memory_limit else None
    record["hbm_bytes_per_s"] = bandwidth
    measure(
        llm, "warm-up", min(batches), args.input, min(args.output, 16)
    )  # kernels compile at their first call
    record["rows"] = rows = []
    for batch in batches:
        row: dict[str, Any] = {
            "batch": batch,
            **measure(llm, f"batch-{batch}", batch, args.input, args.output),
        }
        moved = bytes_per_step(
            llm.engine.spec, batch, args.input + args.output // 2, torch.finfo(llm.engine.dtype).bits // 8
        )
        row["bound_s"] = moved / bandwidth if bandwidth else None
        rows.append(row)
        console.print(f"tp {args.tp}, batch {batch}: {row['step_s'] * 1e3:.2f} ms a step")
    if args.prefill:
        record["prompt"] = measure_prompt(llm, args.prefill, bf16_peak() if on_cuda else None)
    if args.profile and on_cuda:
        record["profile"] = profile(llm, batches[0], args.input, Path(args.profile))
    llm.close()
    return record


def efficiencies(found: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Of a record with "one_rank": what was timed, seconds on one rank and on all; efficiency 1 is `ranks` times as fast."""
    one, pairs = found["one_rank"], []
    for row, alone in zip(found["rows"], one["rows"]):
        pairs.append((f"decode step, batch {row['batch']}", alone["step_s"], row["step_s"]))
    if "prompt" in found:
        prompt, alone = found["prompt"], one["prompt"]
        pairs.append((f"prompt of {prompt['tokens']} tokens", alone["seconds"], prompt["seconds"]))
    return [
        {"what": what, "one_rank_s": alone, "s": all_s, "efficiency": alone / (ranks * all_s)}
        for what, alone, all_s in pairs
    ]


def give_back() -> None:
    """Device memory of an engine that was closed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def results_table(rows: list[dict[str, Any]], num_input: int) -> Table:
    """One row a batch size."""
    table = Table(
        *("batch", "prompt s", "prompt tok/s", "step ms", "p90 ms", "tok/s", "HBM bound ms", "of bound"),
        "transformers ms",
    )
    for row in rows:
        bound, peer = row["bound_s"], row.get("transformers_step_s")
        table.add_row(
            str(row["batch"]),
            f"{row['prefill_s']:.3f}",
            f"{row['batch'] * num_input / row['prefill_s']:,.0f}",
            f"{row['step_s'] * 1e3:.2f}",
            f"{row['p90_s'] * 1e3:.2f}",
            f"{row['batch'] / row['step_s']:,.0f}",
            f"{bound * 1e3:.2f}" if bound else "-",
            f"{bound / row['step_s']:.0%}" if bound else "-",
            f"{peer * 1e3:.2f}" if peer else "-",
        )
    return table


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print, and append the record."""
    model = str(shape_folder(args.shape, args.layers)) if args.shape else args.model
    console = Console(stderr=args.json)
    record = {"case": {k: v for k, v in vars(args).items() if k != "json"}}
    if args.scaling:
        alone = argparse.Namespace(**{**vars(args), "tp": 1, "ep": 1, "profile": None})
        record["one_rank"] = measure_engine(alone, model, console)
        give_back()
    record |= measure_engine(args, model, console)
    rows = record["rows"]
    if args.compare:
        give_back()
        record["peer"] = compare(args, model, rows)
    console.print(results_table(rows, args.input))
    if prompt := record.get("prompt"):
        share = prompt["percent_of_peak"]
        of_peak = (
            "" if share is None else f", {share:.1f} % of the bf16 peak of {prompt['bf16_peak'] / 1e12:.0f}"
        )
        console.print(
            f"prompt of {prompt['tokens']} tokens: {prompt['seconds'] * 1e3:.1f} ms, {prompt['tflops']:.1f} TFLOP/s{of_peak}"
        )
    if args.scaling:
        record["scaling"] = efficiencies(record, args.tp)
        for row in record["scaling"]:
            times = f"{row['one_rank_s'] * 1e3:.2f} ms on one rank, {row['s'] * 1e3:.2f} on {args.tp}"
            console.print(f"{row['what']}: {times}, efficiency {row['efficiency']:.0%}")
    append_record("engine", record)
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
    parser.add_argument(
        "--ep", "--expert-parallel-size", type=int, default=1, help="1, or --tp for whole experts a rank"
    )
    parser.add_argument("--scaling", action="store_true", help="measure one rank first, to compare --tp with")
    parser.add_argument("--dispatch", default="auto", help="as --moe-ep-dispatch")
    parser.add_argument("--batch", default="1,8", help="batch sizes, comma separated")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="new tokens")
    parser.add_argument("--prefill", type=int, default=0, help="also time one prompt of this many tokens")
    parser.add_argument("--profile", help="write a chrome trace of decode steps here (.json or .json.gz)")
    parser.add_argument("--gpu-memory-limit", help="as the engine's flag; no bandwidth is measured then")
    parser.add_argument(
        "--compare", choices=("transformers",), help="measure it on the same shape; needs --shape"
    )
    parser.add_argument("--compare-seconds", type=float, default=240.0, help="it is stopped after so long")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args()
    if args.scaling and args.tp == 1:
        parser.error("--scaling compares ranks with one: give it --tp 2 or more")
    if args.compare and (not args.shape or args.tp > 1):
        parser.error("--compare builds a model of random weights on one GPU: give it --shape, and no --tp")
    run(args)


if __name__ == "__main__":
    main()
