"""The first look: the bundled model writes, and shows which of its experts did the work."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minisgl.config import add_engine_flags, engine_options
from minisgl.core import SamplingParams
from minisgl.engine.offload import cache_report
from minisgl.generate import load
from minisgl.llm import LLM, timed_stream
from minisgl.moe.store import CacheCounters

PROMPTS = (
    "Once upon a time, there was a little fox who",
    "The best way to learn something new is",
)
FRESH_PROMPT = "In a quiet village by the sea"  # not in the prefix cache of the model that wrote the above
SHADES = " ░▒▓█"


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)


def run_demo(args: argparse.Namespace) -> int:
    """Two completions, streamed; then speed, experts used per layer, and where to go from here."""
    console = Console()
    llm = load(args, console, default_model="demo", record_routing=True)
    show(llm, console)
    if not llm.config.offload.moe_expert_offload and llm.config.parallel.tensor_parallel_size == 1:
        show_offload(llm, {"model": "demo", **engine_options(args)}, console)
    console.print(
        '\nNext: [bold]python -m minisgl generate --model PATH "your text"[/] with a model of your own, or\n'
        "      [bold]--moe-expert-quantization int8[/] to see the same model with 8-bit experts.",
        highlight=False,
    )
    return 0


def show(llm: LLM, console: Console, max_tokens: int = 96) -> None:
    """The demo with a model that is loaded."""
    llm.generate(
        list(PROMPTS), SamplingParams(max_tokens=4, ignore_eos=True)
    )  # kernels compile at their first call
    if llm.trace is not None:
        llm.trace.clear()
    seconds, tokens = 0.0, 0
    for seed, prompt in enumerate(PROMPTS):
        console.print(f"\n[bold cyan]{prompt}[/]", end="", highlight=False)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=seed)
        timing = timed_stream(llm, prompt, params, lambda piece: console.out(piece, end="", highlight=False))
        console.print()
        seconds, tokens = seconds + timing.total, tokens + timing.num_tokens
    console.print(
        f"\n{tokens} tokens, {tokens / seconds:.1f} tokens/s on {llm.config.model.device}", highlight=False
    )
    if cache := llm.expert_cache():
        total = sum(cache.values(), CacheCounters())
        console.print(cache_report(total, llm.config.offload.num_slots), highlight=False)
    if llm.trace is not None and llm.trace.layers:
        _print_experts(llm.trace.counts(), llm.trace.layers, console)


def show_offload(llm: LLM, options: Mapping[str, Any], console: Console) -> None:
    """The same model with a quarter of its experts on the device: how often they were there, and whether the text is the same.

    options: with which `llm` was loaded.
    """
    if llm.engine.spec.moe is None:
        return
    options = {**options, "num_pages": 128, "max_total_tokens": None}
    slots = max(1, llm.engine.spec.moe.num_experts // 4)
    offloaded = LLM(**options, moe_expert_offload=True, moe_expert_cache_size=slots)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    one, two = (model.generate(FRESH_PROMPT, params)[0] for model in (llm, offloaded))
    total = sum(offloaded.expert_cache().values(), CacheCounters())
    offloaded.close()
    same = "the same text" if one.token_ids == two.token_ids else "[red]another text[/]"
    console.print("\nExperts in host memory", style="italic", highlight=False)
    console.print(f"{cache_report(total, slots)}: {same}", highlight=False)


def _print_experts(counts_LE: np.ndarray, layers: list[int], console: Console) -> None:
    """A heat map, layers down and experts across: the darker, the more often chosen."""
    num_experts = counts_LE.shape[1]
    table = Table(title="Experts at work", title_justify="left", box=None, padding=(0, 1))
    table.add_column("layer", justify="right")
    table.add_column("used", justify="right")
    table.add_column(f"experts 0 to {num_experts - 1}")
    for layer, counts_E in zip(layers, counts_LE):
        peak = max(int(counts_E.max()), 1)
        cells = "".join(SHADES[min(4, -(-4 * int(c) // peak))] for c in counts_E)
        table.add_row(str(layer), f"{int((counts_E > 0).sum())}/{num_experts}", Text(cells, style="cyan"))
    console.print()
    console.print(table)
