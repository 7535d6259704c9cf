"""Hugging Face transformers on the same shape, as `benchmark/engine.py --compare transformers` runs it.

    python benchmark/engine_peer.py --config folder --batch 1,8,64 --input 128 --output 48

Random weights, experts by grouped_mm, `generate` with a static cache: as it is, and with the compilation that generate does by
itself on a GPU. Prints one JSON line a batch size and way, as soon as it is known, so that whoever stops it keeps the others.
A step is the difference between a long and a short answer, divided by the tokens between.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

SHORT = 2  # tokens of the answer that is subtracted
REPEATS = 3


def build(folder: Path, layers: int | None, device: torch.device, dtype: torch.dtype, experts: str) -> Any:
    """A model with random weights on the device. experts: transformers' name of how experts are computed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if layers:
        config.num_hidden_layers = layers
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if hasattr(config, "num_experts"):
        model.set_experts_implementation(experts)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def seconds(model: Any, ids_BT: torch.Tensor, num_tokens: int, compiled: bool) -> float:
    """One generate of exactly num_tokens."""
    wait = torch.cuda.synchronize if ids_BT.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    out = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=num_tokens,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not compiled,
    )
    wait()
    assert out.shape[1] == ids_BT.shape[1] + num_tokens
    return time.perf_counter() - start


def measure(model: Any, ids_BT: torch.Tensor, num_output: int, compiled: bool) -> dict[str, Any]:
    """step_s, and prompt_s: seconds of a short answer less its steps."""
    begun = time.perf_counter()
    seconds(model, ids_BT, num_output, compiled)  # compiles; the static cache is made for the longest
    warm_up = time.perf_counter() - begun
    long = min(seconds(model, ids_BT, num_output, compiled) for _ in range(REPEATS))
    short = min(seconds(model, ids_BT, SHORT, compiled) for _ in range(REPEATS))
    step = (long - short) / (num_output - SHORT)
    return {"step_s": step, "prompt_s": short - step * (SHORT - 1), "warm_up_s": warm_up}


def run(args: argparse.Namespace) -> None:
    import transformers

    device = torch.device(args.device)
    model = build(Path(args.config), args.layers, device, getattr(torch, args.dtype), args.experts)
    vocab = model.config.vocab_size
    ways = [False, True] if device.type == "cuda" or args.compile else [False]
    for compiled in ways:
        for batch in map(int, args.batch.split(",")):
            generator = torch.Generator().manual_seed(batch)
            ids_BT = torch.randint(1, vocab, (batch, args.input), generator=generator).to(device)
            row: dict[str, Any] = {
                "peer": f"transformers {transformers.__version__}, {args.experts}, static cache",
                "compiled": compiled,
                "batch": batch,
            }
            try:
                row |= measure(model, ids_BT, args.output, compiled)
            except Exception as error:  # a way that fails on this version of torch is a result too
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(row), flush=True)


def run_apart(options: list[str], limit_s: float) -> list[dict[str, Any]]:
    """The lines that a process of its own printed within limit_s, the last one saying so if it was stopped."""
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    rows = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            rows.append(json.loads(line))
            print(f"  {line.strip()}", file=sys.stderr, flush=True)
    code = process.wait()
    timer.cancel()
    if code:
        stopped = not timer.is_alive() and code < 0
        rows.append({"error": f"stopped after {limit_s:.0f} s" if stopped else f"ended with code {code}"})
    return rows


def best_steps(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Seconds of the fastest way's step, by batch size."""
    steps: dict[int, float] = {}
    for row in rows:
        if "step_s" in row:
            steps[row["batch"]] = min(row["step_s"], steps.get(row["batch"], row["step_s"]))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="folder with a config.json")
    parser.add_argument("--layers", type=int, help="fewer layers than the config has")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' experts_implementation")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too")
    with torch.no_grad():
        run(parser.parse_args())


if __name__ == "__main__":
    main()
