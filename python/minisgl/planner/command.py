"""`minisgl plan`: its flags, where config.json comes from, and which machine is meant."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from minisgl.config import add_engine_flags, engine_options
from minisgl.flags import parse_bytes
from minisgl.models.registry import resolve_model
from minisgl.moe.store.pinned import gather_host_facts
from minisgl.planner.breakdown import stored_bytes
from minisgl.planner.candidates import make_plan
from minisgl.planner.machine import Machine, limited, named_machine, pinnable, this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import Request
from minisgl.planner.predict import SHARES
from minisgl.planner.report import plan_dict, print_plan
from minisgl.planner.units import parse_count


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `minisgl plan`: those of the machine and the request, and the engine's, which are kept as given."""
    add = parser.add_argument
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
    add("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)


def run_plan(args: argparse.Namespace) -> int:
    """Plan and print. Exit code 0 if something that this version runs fits, 1 if not; ValueError for bad input."""
    given = engine_options(args)
    model = given.pop("model", "")
    if not model:
        raise ValueError("no model was named: give --model PATH, a config.json, a hub id, or --model demo")
    context = parse_count(args.context, "--context")
    concurrency = parse_count(args.concurrency, "--concurrency")
    config, folder = read_config(model, given)
    request = Request(model, context, concurrency, given)
    plan = make_plan(read_numbers(config, folder), machine_of(args, given), request)
    stored = stored_bytes(folder) if folder else None
    if args.json:
        print(json.dumps({**plan_dict(plan), "checkpoint_bytes": stored}, indent=2))
    else:
        print_plan(plan, Console(), stored)
    return 0 if plan.recommended else 1


def read_config(model: str, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], Path | None]:
    """(config.json as a dictionary, the model's folder if it is one). Of a hub model only text files are fetched.

    options: engine options; of these the hub, the revision and --offline count.
    """
    path = Path(model).expanduser()
    folder = None
    if not path.is_file():
        folder = resolve_model(
            model,
            options.get("model_source", "huggingface"),
            options.get("revision"),
            weights=False,
            offline=bool(options.get("offline")),
        )
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


def machine_of(args: argparse.Namespace, given: Mapping[str, Any]) -> Machine:
    """The machine that the flags describe: this one, with what was said about it, or a named one."""
    gpu_bytes = parse_bytes(args.gpu_memory, "--gpu-memory") if args.gpu_memory else None
    host_bytes = parse_bytes(args.host_memory, "--host-memory") if args.host_memory else None
    link = None if args.link_gbps == "auto" else _rate(args.link_gbps)
    machine = None
    if args.gpu is None:
        machine = this_machine()
        if gpu_bytes:
            machine = limited(machine, gpu_bytes)
        if host_bytes:
            facts = replace(gather_host_facts(), total=host_bytes, available=host_bytes)
            machine = replace(machine, host_bytes=host_bytes, pinnable_bytes=pinnable(facts))
    if machine is None or (gpu_bytes and not machine.gpu):
        machine = named_machine(args.gpu, gpu_bytes, host_bytes, SHARES)
    if limit := given.get("gpu_memory_limit"):
        machine = limited(machine, parse_bytes(limit, "--gpu-memory-limit"))
    return machine if link is None else replace(machine, link_gbps=link)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < 10_000.0:
        raise ValueError(f"--link-gbps {text!r} is not a rate: write auto or GB/s, for example 25")
    return rate
