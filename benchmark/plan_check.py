"""Is the planner right? Loads models of random weights on this GPU and compares what was predicted with what was allocated.

    python benchmark/plan_check.py                      the Qwen3-30B-A3B shape: 4 layers resident, 12 with fp8 experts on the
                                                        host and 30 slots a layer (7 GiB of host memory); under a minute
    python benchmark/plan_check.py --resident 4,48      with all layers too (58 GiB), whose KV pages are what memory leaves
    python benchmark/plan_check.py --resident "" --offloaded 48

Smaller models get SMALL_PAGES, so that weights and scratch are not lost beside a pool of a hundred GiB. For each: bytes kept
on the device (weights, KV pages, page table, workspace, graphs) against torch.cuda.memory_allocated, their peak with the
temporaries of the largest step against max_memory_allocated, and bytes on the host against the engine's ledger. Told beside
these: all that the process takes of the device (the allocator's spare blocks too), KV pages that the engine chose against those
of the plan, milliseconds a token, seconds of a prompt. Prints JSON, appends it to benchmark/results/plan_check.jsonl, and exits
with 1 if a number of bytes is off by more than 3 %.
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
from minisgl.engine.memory import predict_ledger, setup_of
from minisgl.moe.store import CacheCounters
from minisgl.planner.candidates import make_plan
from minisgl.planner.machine import this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import Request
from minisgl.planner.predict import decode_ms, prefill_seconds
from record import append_record

TOLERANCE = 0.03
PROMPT = 8192
DECODED = 64
SMALL_PAGES = 1024
FULL_LAYERS = 48
OFFLOADED: dict[str, Any] = {
    "moe_expert_quantization": "fp8",
    "moe_expert_offload": True,
    "moe_expert_cache_size": "30",
}


def check(config: dict[str, Any], folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Predicted and actual numbers of one model, as pairs; see the module."""
    (folder / "config.json").write_text(json.dumps(config))
    numbers, machine = read_numbers(config), this_machine()
    request = Request(str(folder), context=PROMPT + DECODED + 2, given={"device": "cuda", **options})
    plan = make_plan(numbers, machine, request)
    wanted = (options["moe_expert_quantization"], "moe_expert_offload" in options)
    planned = next(c for c in plan.candidates if (c.setup.weight_format, c.setup.offloaded) == wanted)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    llm = LLM(str(folder), device="cuda", dummy_weight=True, **options)
    ms, prefill_s, hit_rate = measure_speed(llm)
    engine = llm.engine
    setup = setup_of(engine.config, engine.kv_pool.num_pages)
    predicted, ledger = predict_ledger(numbers.sizes, setup), engine.ledger()
    device = predicted.on("device")
    result = {
        "layers": config["num_hidden_layers"],
        "options": options,
        "predicted": {line.name: line.num_bytes for line in predicted.lines},
        "ledger": {line.name: line.num_bytes for line in ledger.lines},
        "kept_bytes": [device - predicted.line("one step"), torch.cuda.memory_allocated() - before],
        "peak_bytes": [device, torch.cuda.max_memory_allocated() - before],
        "process": [device + machine.gpu_used, machine.gpu_bytes - torch.cuda.mem_get_info()[0]],
        "host_bytes": [predicted.on("host"), ledger.on("host")],
        "kv_tokens": [planned.kv_tokens, (engine.kv_pool.num_pages - 1) * setup.page_size],
        "hit_rate": hit_rate,
        "decode_ms": [decode_ms(numbers.sizes, setup, machine, PROMPT, hit_rate), ms],
        "prefill_s": [prefill_seconds(numbers.sizes, setup, machine, PROMPT), prefill_s],
    }
    llm.close()
    return result


def measure_speed(llm: LLM) -> tuple[float, float, float]:
    """(milliseconds a token after a long prompt, seconds of that prompt, share of the tokens' experts that were in a slot).

    First runs compile the kernels, those behind a cached prefix too. Tokens are the difference of two runs of a prompt that the
    prefix cache has.
    """

    def run(num_tokens: int, shift: int) -> tuple[float, CacheCounters]:
        prompt = [(7 * i + shift) % 1000 for i in range(PROMPT)]  # another shift is no prefix the cache knows
        before, start = sum(llm.expert_cache().values(), CacheCounters()), time.perf_counter()
        llm.generate([prompt], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        elapsed = time.perf_counter() - start
        return elapsed, sum(llm.expert_cache().values(), CacheCounters()) - before

    for _ in range(2):
        run(4, 1)
    prompt_s, _ = run(1, 2)
    (end_s, of_end), (both_s, of_both) = run(1, 2), run(1 + DECODED, 2)
    tokens = of_both - of_end
    offloaded = tokens.hits + tokens.misses > 0
    return (both_s - end_s) / DECODED * 1e3, prompt_s, min(1.0, tokens.hit_rate) if offloaded else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resident", default="4", help="numbers of layers with all experts on the device")
    parser.add_argument("--offloaded", default="12", help="numbers of layers with experts on the host")
    parser.add_argument("--moe-expert-quantization", default="none", help="of the resident ones")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("plan_check needs a CUDA device", file=sys.stderr)
        return 2
    resident = {"moe_expert_quantization": args.moe_expert_quantization}
    cases = [
        (int(layers), options)
        for text, options in ((args.resident, resident), (args.offloaded, OFFLOADED))
        for layers in filter(None, text.split(","))
    ]
    worst, began = 0.0, time.perf_counter()
    for layers, options in cases:
        with tempfile.TemporaryDirectory() as folder:
            config = {**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": layers}
            start = time.perf_counter()
            pages = {} if layers >= FULL_LAYERS else {"num_pages": SMALL_PAGES}
            result = check(config, Path(folder), {**options, **pages})
        gc.collect()
        torch.cuda.empty_cache()
        pairs = {name: pair for name, pair in result.items() if name.endswith("_bytes") and any(pair)}
        errors = {name: predicted / actual - 1 for name, (predicted, actual) in pairs.items()}
        result |= {"errors": errors, "seconds": time.perf_counter() - start}
        worst = max(worst, *map(abs, errors.values()))
        print(json.dumps(result, indent=2))
        append_record("plan_check", result)
    print(
        f"largest error {100 * worst:.2f} % (allowed {100 * TOLERANCE:.0f} %), {time.perf_counter() - began:.0f} s"
    )
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
