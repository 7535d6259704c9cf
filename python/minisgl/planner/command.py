"""`minisgl plan`: its flags, where config.json comes from, and which machine is meant."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.flags import add_flags, iter_flags, parse_bytes
from minisgl.models.checkpoints import read_headers
from minisgl.models.registry import resolve_model
from minisgl.planner.machine import Machine, named_machine, pinnable, this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import Request, make_plan
from minisgl.planner.predict import SHARES
from minisgl.planner.report import plan_dict, print_plan
from minisgl.planner.units import parse_count

PINNED_OPTIONS = (
    "moe_expert_quantization", "moe_quantization_group_size", "dtype", "device", "memory_ratio", "page_size",
    "max_prefill_length", "max_running_requests", "cuda_graph_max_bs",
)  # fmt: skip
"""Engine options that `plan` takes too; given ones are kept as they are."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `minisgl plan`."""
    add = parser.add_argument
    add("--model", "--model-path", required=True, help="folder, config.json, hub id, or a bundled name")
    add(
        "--model-source",
        default="huggingface",
        choices=("huggingface", "modelscope"),
        help="hub an id refers to",
    )
    add("--revision", default=None, help="branch, tag or commit of a hub model")
    add("--gpu", default=None, help='plan for this card instead of this machine, e.g. "RTX 5070"')
    add("--gpu-memory", default=None, help="memory of the card, e.g. 12GiB (default: all of it)")
    add(
        "--host-memory",
        default=None,
        help="host memory to plan with, e.g. 32GiB (default: what is available here)",
    )
    add("--link-gbps", default="auto", help="host to device in GB/s; auto measures it, or takes the card's")
    add("--context", type=int, default=32_768, help="tokens of a request, prompt and answer (default 32768)")
    add("--concurrency", type=int, default=1, help="requests of that length at the same time (default 1)")
    add("--tp", type=int, default=1, dest="num_ranks", help="GPUs that share the model")
    add(
        "--expert-parallel",
        action="store_true",
        help="with --tp: whole experts a GPU instead of a slice of each",
    )
    add("--json", action="store_true", help="print JSON")
    fields = {item.name: item for _, item in iter_flags(EngineConfig)}
    add_flags(parser, [fields[name] for name in PINNED_OPTIONS], "options to keep as they are")


def run_plan(args: argparse.Namespace) -> int:
    """Plan and print. Exit code 0 if something that this version runs fits, 1 if not; ValueError for bad input."""
    config, folder = read_config(args.model, args.model_source, args.revision)
    request = Request(
        model=args.model,
        context=parse_count(args.context, "--context"),
        concurrency=parse_count(args.concurrency, "--concurrency"),
        given={name: getattr(args, name) for name in PINNED_OPTIONS if hasattr(args, name)},
        num_ranks=parse_count(args.num_ranks, "--tp"),
        expert_parallel=args.expert_parallel,
    )
    plan = make_plan(read_numbers(config), machine_of(args), request)
    on_disk = checkpoint_bytes(folder) if folder else None
    if args.json:
        print(json.dumps({**plan_dict(plan), "checkpoint_bytes": on_disk}, indent=2))
    else:
        console = Console()
        print_plan(plan, console)
        if on_disk:
            console.print(f"[dim]the checkpoint on disk has {on_disk / 2**30:,.2f} GiB[/]", highlight=False)
    return 0 if plan.recommended else 1


def read_config(model: str, source: str, revision: str | None) -> tuple[Mapping[str, Any], Path | None]:
    """(config.json as a dictionary, the model's folder if it is one). Of a hub model only text files are fetched."""
    path = Path(model).expanduser()
    folder = None
    if not path.is_file():
        folder = resolve_model(model, source, revision, weights=False)
        path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: give a model folder or a config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object: is it a config.json?")
    return config, folder


def checkpoint_bytes(folder: Path) -> int | None:
    """Exact bytes of all tensors in a folder's safetensors, whatever their types, from their headers; None without weights.

    A file is 8 bytes that give the length of the header, the header, and the tensors back to back (safetensors' format).
    """
    if not any(folder.glob("*.safetensors")):
        return None
    files = {header.file for header in read_headers(folder)}
    return sum(file.stat().st_size - 8 - int.from_bytes(_first_bytes(file, 8), "little") for file in files)


def _first_bytes(file: Path, count: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(count)


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the flags describe: this one, with what was said about it, or a named one."""
    gpu_bytes = parse_bytes(args.gpu_memory, "--gpu-memory") if args.gpu_memory else None
    host_bytes = parse_bytes(args.host_memory, "--host-memory") if args.host_memory else None
    link = None if args.link_gbps == "auto" else _rate(args.link_gbps)
    machine = None
    if args.gpu is None:
        machine = this_machine()
        if gpu_bytes and machine.gpu:
            machine = replace(machine, gpu_bytes=gpu_bytes)
        if host_bytes:
            machine = replace(machine, host_bytes=host_bytes, pinnable_bytes=pinnable(host_bytes))
    if machine is None or (gpu_bytes and not machine.gpu):
        machine = named_machine(args.gpu, gpu_bytes, host_bytes, SHARES)
    return machine if link is None else replace(machine, link_gbps=link)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < 10_000.0:
        raise ValueError(f"--link-gbps {text!r} is not a rate: write auto or GB/s, for example 25")
    return rate
