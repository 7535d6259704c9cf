"""Is the planner right? Loads models of random weights on this GPU and compares what was predicted with what was allocated.

    python benchmark/plan_check.py                      the Qwen3-30B-A3B shape with 4 layers, then with all 48 (58 GiB)
    python benchmark/plan_check.py --layers 4,12        smaller ones

The 48 layers get the KV pages that memory leaves; smaller models get SMALL_PAGES, so that weights and scratch are not lost
beside a pool of a hundred GiB. For each: bytes kept (weights, KV pages, page table, workspace, graphs) against
torch.cuda.memory_allocated, their peak with the temporaries of the largest step against max_memory_allocated, KV pages that the
engine chose against those of the plan, and milliseconds a token. Prints JSON, appends it to benchmark/results/plan_check.jsonl,
and exits with 1 if a total is off by more than 3 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine import SHAPES
from minisgl import LLM, SamplingParams
from minisgl.engine.memory import Ledger, predict_ledger, setup_of
from minisgl.planner.machine import this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import Request, make_plan
from minisgl.planner.predict import predict_speed
from record import append_record

TOLERANCE = 0.03
PROMPT = 8192
DECODED = 64
SMALL_PAGES = 1024
FULL_LAYERS = 48


def check(config: dict[str, Any], folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Predicted and actual numbers of one model; see the module."""
    (folder / "config.json").write_text(json.dumps(config))
    numbers, machine = read_numbers(config), this_machine()
    request = Request(str(folder), context=PROMPT + DECODED + 2, given={"device": "cuda", **options})
    plan = make_plan(numbers, machine, request)
    wanted = options.get("moe_expert_quantization", "none")
    planned = next(
        c for c in plan.candidates if c.setup.weight_format == wanted and c.setup.num_slots is None
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    llm = LLM(str(folder), device="cuda", dummy_weight=True, **options)
    ms, prefill_s = measure_speed(llm)
    engine = llm.engine
    setup = setup_of(engine.config, engine.kv_pool.num_pages)
    predicted = predict_ledger(numbers.sizes, setup)
    kept = Ledger(tuple(line for line in predicted.lines if line.name != "one step"))
    speed = predict_speed(numbers.sizes, setup, machine, PROMPT, PROMPT)
    return {
        "layers": config["num_hidden_layers"],
        "options": options,
        "predicted": {line.name: line.num_bytes for line in predicted.lines},
        "ledger": {line.name: line.num_bytes for line in engine.ledger().lines},
        "kept_bytes": [kept.total, torch.cuda.memory_allocated() - before],
        "peak_bytes": [predicted.total, torch.cuda.max_memory_allocated() - before],
        "process_bytes": [
            predicted.total + machine.gpu_used,
            machine.gpu_bytes - torch.cuda.mem_get_info()[0],
        ],
        "kv_tokens": [planned.kv_tokens, (engine.kv_pool.num_pages - 1) * setup.page_size],
        "decode_ms": [speed.decode_ms, ms],
        "prefill_s": [speed.prefill_s, prefill_s],
    }


def measure_speed(llm: LLM) -> tuple[float, float]:
    """(milliseconds a token after a long prompt, seconds of that prompt); the prompt's kernels are compiled by a first run."""

    def seconds(num_tokens: int, shift: int) -> float:
        prompt = [(7 * i + shift) % 1000 for i in range(PROMPT)]  # another shift is no prefix the cache knows
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return time.perf_counter() - start

    seconds(4, 1)
    prompt_only, with_tokens = seconds(1, 2), seconds(1 + DECODED, 3)
    return (with_tokens - prompt_only) / DECODED * 1e3, prompt_only


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="4,48", help="numbers of layers to try")
    parser.add_argument("--moe-expert-quantization", default="none")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("plan_check needs a CUDA device", file=sys.stderr)
        return 2
    options = {"moe_expert_quantization": args.moe_expert_quantization}
    worst = 0.0
    for layers in map(int, args.layers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            config = {**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": layers}
            start = time.perf_counter()
            pages = {} if layers >= FULL_LAYERS else {"num_pages": SMALL_PAGES}
            result = check(config, Path(folder), {**options, **pages})
        gc.collect()
        torch.cuda.empty_cache()
        errors = {name: a / b - 1 for name, (a, b) in result.items() if name.endswith("_bytes")}
        result |= {"errors": errors, "seconds": time.perf_counter() - start}
        worst = max(worst, *map(abs, errors.values()))
        print(json.dumps(result, indent=2))
        append_record("plan_check", result)
    print(f"largest error {100 * worst:.2f} % (allowed {100 * TOLERANCE:.0f} %)")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
