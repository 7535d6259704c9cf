"""The planner at work inside of other commands: `--auto`, and what to say when the engine does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from minisgl.engine.memory import DoesNotFit
from minisgl.flags import parse_bytes
from minisgl.planner.command import read_config
from minisgl.planner.machine import Machine, limited, this_machine
from minisgl.planner.numbers import read_numbers
from minisgl.planner.plan import Plan, Request, closest, make_plan
from minisgl.planner.report import memory_bar

AUTO_CONTEXT = 32_768
RETRY_CONTEXT = 4_096  # tokens that a command line must leave room for to be worth suggesting
NEAREST = 3
TUNED = ("moe_expert_quantization", "max_prefill_length", "max_running_requests", "device", "num_pages")
"""Options that a plan sets; a suggestion may change the user's own values of these."""


def plan_for(
    options: Mapping[str, Any], context: int, machine: Machine | None = None, command: str = "serve"
) -> Plan:
    """A plan for engine options as `LLM` takes them; all that are given are kept. machine: None measures this one."""
    config, _ = read_config(
        options["model"], options.get("model_source", "huggingface"), options.get("revision")
    )
    given = {name: value for name, value in options.items() if name != "model"}
    request = Request(options["model"], context, given=given, command=f"python -m minisgl {command}")
    machine = machine or this_machine()
    if limit := options.get("gpu_memory_limit"):
        machine = limited(machine, parse_bytes(limit, "--gpu-memory-limit"))
    return make_plan(read_numbers(config), machine, request)


def apply_auto(
    options: Mapping[str, Any], console: Console, machine: Machine | None = None
) -> dict[str, Any]:
    """`--auto`: the given engine options, completed by those of the recommended plan, which is printed. Given ones win.

    Raises ValueError with the nearest set-up if nothing fits.
    """
    plan = plan_for(options, AUTO_CONTEXT, machine)
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


def explain_misfit(
    error: DoesNotFit, options: Mapping[str, Any], machine: Machine | None = None, command: str = "serve"
) -> str:
    """The error as a plan: what is missing, and up to three command lines that fit, the nearest to what was asked first.

    Nearest: those that change the fewest of the options given, then by speed.
    """
    plan = plan_for({k: v for k, v in options.items() if k not in TUNED}, RETRY_CONTEXT, machine, command)
    usable = [c for c in plan.candidates if c.usable]
    if not usable:
        return f"{error}\n{closest(plan)}"

    def changes(candidate: Any) -> int:
        return sum(options.get(name) != candidate.options.get(name) for name in TUNED)

    nearest = sorted(usable, key=lambda c: (changes(c), c.local.decode_ms))[:NEAREST]
    lines = [f"  {plan.command(c)}   # {c.label}, about {c.local.decode_ms:.1f} ms a token" for c in nearest]
    return "\n".join([str(error), "These fit:", *lines])
