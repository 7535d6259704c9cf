"""The planner at work inside of other commands: `--auto`, and what to say when the engine does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.engine.memory import DoesNotFit
from minisgl.flags import iter_flags, parse_bytes
from minisgl.planner.candidates import make_plan
from minisgl.planner.command import read_config
from minisgl.planner.machine import Machine, limited, named_machine, this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import Candidate, Plan, Request, closest
from minisgl.planner.predict import SHARES
from minisgl.planner.report import memory_bar

AUTO_CONTEXT = 32_768
RETRY_CONTEXT = 4_096  # tokens that a command line must leave room for to be worth suggesting
NEAREST = 3
TUNED = (
    "moe_expert_quantization", "moe_expert_offload", "moe_expert_cache_size", "moe_offload_mode", "max_prefill_length",
    "max_running_requests", "device", "num_pages", "max_total_tokens",
)  # fmt: skip
"""Options that a plan sets; a suggestion may change the user's own values of these."""


def plan_for(
    options: Mapping[str, Any], context: int, machine: Machine | None = None, command: str = "serve"
) -> Plan:
    """A plan for engine options as `LLM` takes them; all that are given are kept. machine: None measures this one.

    command: that of the command lines, or "LLM".
    """
    config, folder = read_config(options["model"], options)
    given = {name: value for name, value in options.items() if name != "model"}
    words = command if command == "LLM" else f"python -m minisgl {command}"
    request = Request(options["model"], context, given=given, command=words)
    machine = machine or _here()
    if limit := options.get("gpu_memory_limit"):
        machine = limited(machine, parse_bytes(limit, "--gpu-memory-limit"))
    return make_plan(read_numbers(config, folder), machine, request)


def _here() -> Machine:
    """This machine; where an engine that failed still holds the memory that measuring needs, with rates that are guessed."""
    try:
        return this_machine()
    except torch.OutOfMemoryError:
        guess = named_machine(None, None, None, SHARES)
        bare = this_machine(measure=False)
        return replace(
            bare,
            read_gbps=guess.read_gbps,
            tflops=guess.tflops,
            link_gbps=guess.link_gbps,
            measured=False,
            notes=guess.notes,
        )


def apply_auto(
    options: Mapping[str, Any], console: Console, machine: Machine | None = None, command: str = "serve"
) -> dict[str, Any]:
    """`--auto`: the given engine options, completed by those of the recommended plan, which is printed. Given ones win.

    Raises ValueError with the nearest set-up if nothing fits.
    """
    plan = plan_for(options, AUTO_CONTEXT, machine, command)
    if plan.recommended is None:
        raise ValueError(f"--auto found nothing that fits. {closest(plan)}")
    chosen = plan.recommended
    console.print(memory_bar(plan, chosen))
    console.print(
        f"[dim]--auto: {chosen.label}, about {chosen.local.decode_ms:.1f} ms a token; room for {chosen.kv_tokens:,} tokens; "
        f"the same as {plan.command(chosen)}[/]",
        highlight=False,
        soft_wrap=True,
    )
    return {**chosen.options, **options}


def options_of(config: EngineConfig) -> dict[str, Any]:
    """The options that a configuration was made of: what differs from the defaults."""
    values = {
        item.name: getattr(getattr(config, group), item.name) for group, item in iter_flags(EngineConfig)
    }
    return {
        item.name: values[item.name]
        for _, item in iter_flags(EngineConfig)
        if values[item.name] != item.default
    }


def explain_misfit(
    error: DoesNotFit, options: Mapping[str, Any], machine: Machine | None = None, command: str = "serve"
) -> str:
    """The error as a plan: what is missing, and up to three command lines that fit, the nearest to what was asked first.

    command: "serve", "generate" and so on, or "LLM" for calls in Python. Nearest: those that change the fewest of the options
    given, then by speed; one for each format and place of the experts.
    """
    kept = {name: value for name, value in options.items() if name not in TUNED}
    try:
        plan = plan_for(kept, RETRY_CONTEXT, machine, command)
    except ValueError as reason:
        return f"{error.shortage}\nNothing else could be planned: {reason}"

    def distance(candidate: Candidate) -> tuple[int, float]:
        changes = sum(options.get(name) != candidate.options.get(name) for name in TUNED)
        return changes, candidate.local.answer_s

    kinds: dict[tuple[str, bool, bool], Candidate] = {}
    for candidate in sorted((c for c in plan.candidates if c.usable), key=distance):
        setup = candidate.setup
        kinds.setdefault((setup.weight_format, setup.on_cuda, setup.offloaded), candidate)
    if not kinds:
        return f"{error.shortage}\n{closest(plan)}"
    lines = [
        f"  {plan.command(c)}   # {c.label}, about {c.local.decode_ms:.1f} ms a token"
        for c in list(kinds.values())[:NEAREST]
    ]
    return "\n".join([error.shortage, "These fit:", *lines])
