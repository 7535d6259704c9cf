"""Commands: `python -m minisgl COMMAND …`. Errors that a user can mend are one line and exit code 2.

generate   continue prompts, streaming            demo   the bundled model, as a first look
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from minisgl import __version__
from minisgl.config import EngineConfig, add_flags, flag_names, iter_flags
from minisgl.core import RequestOutput, SamplingParams
from minisgl.demo import run_demo
from minisgl.llm import LLM

SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "new tokens at most (default 128)"),
    ("temperature", float, "0 is greedy, the default"),
    ("top_k", int, "keep the k likeliest tokens; 0 is off"),
    ("top_p", float, "keep the likeliest tokens that make up this probability"),
    ("min_p", float, "drop tokens below this fraction of the likeliest one's probability"),
    ("repetition_penalty", float, "above 1 discourages tokens seen before"),
    ("seed", int, "same seed, same text"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and any(w.split("=")[0] in ("--model", "--model-path") for w in words):
        words.insert(0, "serve")
    parser = _parser()
    args = parser.parse_args(words)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minisgl", description="Mixture-of-Experts models on the GPU you own")
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "continue one or more prompts")
    generate.add_argument("prompt", nargs="+", help="text to continue; several are run as one batch")
    generate.add_argument("--json", action="store_true", help="one JSON line a prompt instead of text")
    for name, kind, text in SAMPLING_FLAGS:
        flag = "--" + name.replace("_", "-")
        generate.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS, help=text)
    generate.add_argument("--stop", action="append", default=[], help="end before this text; may be given again")
    _add_engine_flags(generate)
    demo = _command(commands, "demo", _demo, "write text with the bundled model and show its experts at work")
    _add_engine_flags(demo)
    serve = _command(commands, "serve", _serve, "OpenAI-compatible server (also: minisgl --model NAME …)")
    _add_engine_flags(serve)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    for group in dataclasses.fields(EngineConfig):
        fields = [item for name, item in iter_flags(EngineConfig) if name == group.name]
        add_flags(parser, fields, group.name)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine flags that were given, as keyword arguments of `LLM`."""
    names = {item.name for _, item in iter_flags(EngineConfig)}
    return {name: value for name, value in vars(args).items() if name in names}


def load(
    args: argparse.Namespace, console: Console, default_model: str | None = None, record_routing: bool = False
) -> LLM:
    """An LLM from the flags, telling what was decided."""
    options = engine_options(args)
    model = options.pop("model", default_model)
    if not model:
        flags = next(flag_names(item) for _, item in iter_flags(EngineConfig) if item.name == "model")
        raise ValueError(f"no model was named: give {flags[0]} PATH, a hub id, or {flags[0]} demo")
    llm = LLM(model, record_routing=record_routing, **options)
    for decision in llm.decisions:
        console.print(f"[dim]{decision.flag} {decision.value}: {decision.reason}[/]", highlight=False)
    return llm


def _generate(args: argparse.Namespace) -> int:
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
    return 0


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


def _demo(args: argparse.Namespace) -> int:
    console = Console()
    run_demo(load(args, console, default_model="demo", record_routing=True), console)
    return 0


def _serve(args: argparse.Namespace) -> int:
    raise ValueError("the server is not part of this version yet: use `minisgl generate`, or LLM from Python")
