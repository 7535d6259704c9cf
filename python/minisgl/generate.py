"""`minisgl generate`: continue prompts from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from minisgl.config import add_engine_flags, engine_options
from minisgl.core import RequestOutput, SamplingParams
from minisgl.engine.offload import cache_report, cache_table
from minisgl.llm import LLM
from minisgl.moe.store import CacheCounters
from minisgl.planner import apply_auto

SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "new tokens at most (default 128)"),
    ("temperature", float, "0 is greedy, the default"),
    ("top_k", int, "keep the k likeliest tokens; 0 is off"),
    ("top_p", float, "keep the likeliest tokens that make up this probability"),
    ("min_p", float, "drop tokens below this fraction of the likeliest one's probability"),
    ("repetition_penalty", float, "above 1 discourages tokens seen before"),
    ("seed", int, "same seed, same text"),
)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="+", help="text to continue; several are run as one batch")
    parser.add_argument("--json", action="store_true", help="one JSON line a prompt instead of text")
    for name, kind, text in SAMPLING_FLAGS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--stop", action="append", default=[], help="end before this text; may be given again"
    )
    parser.add_argument("--auto", action="store_true", help="take the flags that `minisgl plan` recommends")
    add_engine_flags(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Stream one prompt, or print several as a table or as JSON lines. Notes go to stderr."""
    notes = Console(stderr=True)
    given = {name: getattr(args, name) for name, _, _ in SAMPLING_FLAGS if hasattr(args, name)}
    params = SamplingParams(**{"max_tokens": 128, "temperature": 0.0, "stop": args.stop, **given})
    llm = load(args, notes)
    if len(args.prompt) == 1 and not args.json:
        for piece in llm.stream(args.prompt[0], params):
            print(piece, end="", flush=True)
        print()
    else:
        _print_outputs(llm.generate(args.prompt, params), args.json)
    stats = llm.stats()
    notes.print(f"[dim]{stats.generated_tokens} tokens in {stats.steps} steps[/]", highlight=False)
    if cache := llm.expert_cache():
        total = sum(cache.values(), CacheCounters())
        notes.print(f"[dim]{cache_report(total, llm.config.offload.num_slots)}[/]", highlight=False)
        notes.print(cache_table(cache), style="dim", highlight=False)
    llm.close()
    return 0


def load(
    args: argparse.Namespace, console: Console, default_model: str | None = None, record_routing: bool = False
) -> LLM:
    """An LLM from the flags, telling what was decided."""
    options = engine_options(args)
    options.setdefault("model", default_model)
    if not options["model"]:
        raise ValueError("no model was named: give --model PATH, a hub id, or --model demo")
    if getattr(args, "auto", False):
        words = " ".join(["generate", *map(shlex.quote, getattr(args, "prompt", []))])
        options = apply_auto(options, console, command=words)
    llm = LLM(record_routing=record_routing, **options)
    for decision in llm.decisions:
        console.print(f"[dim]{decision.flag} {decision.value}: {decision.reason}[/]", highlight=False)
    return llm


def _print_outputs(outputs: Sequence[RequestOutput], as_json: bool) -> None:
    if as_json:
        for output in outputs:
            print(json.dumps(dataclasses.asdict(output)))
        return
    table = Table(show_lines=True)
    table.add_column("prompt")
    table.add_column("continuation")
    table.add_column("end")
    for output in outputs:
        table.add_row(output.prompt, output.text or f"[red]{output.error}[/]", output.finish_reason.value)
    Console().print(table)
