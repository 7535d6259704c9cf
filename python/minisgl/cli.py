"""`python -m minisgl COMMAND …`: a table of commands, and how errors are told.

A command's module is loaded when it is called, so `--help` is quick, and a missing extra concerns only who asks for it. Errors
that a user can mend are one line and exit code 2; a model that does not fit is answered with the set-ups that would.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from rich.console import Console

from minisgl import __version__
from minisgl.config import engine_options
from minisgl.engine.step import EngineLost


@dataclass(frozen=True)
class Command:
    """A command: its module, the functions that add its arguments and run it, and one line of help."""

    module: str
    add_arguments: str
    run: str
    help: str


COMMANDS = {
    "generate": Command(
        "minisgl.generate", "add_generate_arguments", "run_generate", "continue one or more prompts"
    ),
    "demo": Command(
        "minisgl.demo",
        "add_demo_arguments",
        "run_demo",
        "write with the bundled model, see its experts at work",
    ),
    "serve": Command(
        "minisgl.server.commands",
        "add_serve_arguments",
        "run_serve",
        "OpenAI-compatible server; also: minisgl --model X",
    ),
    "chat": Command("minisgl.server.commands", "add_chat_arguments", "run_chat", "chat in the terminal"),
    "bench-serve": Command(
        "minisgl.server.commands", "add_bench_arguments", "run_bench", "load a running server and measure it"
    ),
    "plan": Command(
        "minisgl.planner", "add_plan_arguments", "run_plan", "will it fit, how fast, which flags"
    ),
    "convert": Command(
        "minisgl.convert", "add_convert_arguments", "run_convert", "quantize once, load fast ever after"
    ),
    "plan-experts": Command(
        "minisgl.planner.experts",
        "add_plan_experts_arguments",
        "run_plan_experts",
        "spread experts over GPUs by a recorded trace",
    ),
    "env": Command(
        "minisgl.planner", "add_env_arguments", "run_env", "what this machine is, for bug reports"
    ),
    "tune": Command(
        "minisgl.tune", "add_tune_arguments", "run_tune", "measure the best MoE kernels for this GPU"
    ),
}
MODEL_FLAGS = ("--model", "--model-path")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and any(word.split("=")[0] in MODEL_FLAGS for word in words):
        words = ["chat", *(w for w in words if w != "--shell")] if "--shell" in words else ["serve", *words]
    overview = _overview()
    if not words or words[0] not in COMMANDS:
        overview.parse_args(words)  # --help, --version, or an unknown word: exits with its message
        overview.print_help()
        return 2
    return _run(words[0], words[1:])


def _overview() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:12} {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="minisgl",
        description="Mixture-of-Experts models on the GPU you own",
        epilog=f"commands:\n{lines}\n\nminisgl COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return parser


def _run(name: str, words: list[str]) -> int:
    errors = Console(stderr=True, soft_wrap=True)
    args = argparse.Namespace()
    try:
        command = COMMANDS[name]
        module = import_module(command.module)
        parser = argparse.ArgumentParser(prog=f"minisgl {name}", description=command.help)
        getattr(module, command.add_arguments)(parser)
        args = parser.parse_args(words)
        return getattr(module, command.run)(args)
    except ValueError as error:
        errors.print(f"[bold red]error:[/] {_explained(error, args, name)}", highlight=False)
        return 2
    except ImportError as error:
        errors.print(f"[bold red]error:[/] {error}", highlight=False)
        return 2
    except EngineLost as error:
        errors.print(f"[bold red]error:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _explained(error: ValueError, args: argparse.Namespace, command: str) -> str:
    """The error's message; for a model that does not fit, the set-ups that would."""
    memory = import_module("minisgl.engine.memory")
    if not isinstance(error, memory.DoesNotFit):
        return str(error)
    words = " ".join([command, *map(shlex.quote, getattr(args, "prompt", []))])
    return import_module("minisgl.planner").explain_misfit(error, engine_options(args), command=words)
