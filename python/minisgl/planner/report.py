"""A plan for people (tables and a bar) and for programs (a dictionary that becomes JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from minisgl.engine.memory import Setup
from minisgl.models.spec import FAMILIES
from minisgl.planner.breakdown import breakdown, cache_sizes, format_bytes, value_bytes
from minisgl.planner.machine import Machine
from minisgl.planner.plan import OFFERED, PREFILL_TOKENS, Candidate, Plan, closest
from minisgl.planner.predict import kv_read_bytes
from minisgl.planner.units import gib

BAR_WIDTH = 72
BAR_COLORS = {
    "embedding": "blue",
    "head": "bright_blue",
    "attention": "cyan",
    "norms": "white",
    "router": "red",
    "shared experts": "bright_magenta",
    "dense MLPs": "bright_cyan",
    "experts": "magenta",
    "scales of experts": "bright_red",
    "experts on the host": "magenta",
    "transient experts": "dark_magenta",
    "KV pages": "green",
    "page table": "white",
    "workspace": "yellow",
    "CUDA graphs": "bright_green",
    "one step": "bright_yellow",
    "not ours": "bright_black",
}


def print_plan(plan: Plan, console: Console, stored: Mapping[str, int] | None = None) -> None:
    """Machine, model, the recommended set-up with its bar, every other one, and the command to copy.

    stored: bytes of the checkpoint by part (`breakdown.stored_bytes`).
    """
    console.print(_machine_line(plan.machine), highlight=False)
    if plan.request.num_ranks > 1:
        console.print(
            f"Bytes are those of each of {plan.request.num_ranks} GPUs; the time of what they send each other is not counted",
            highlight=False,
        )
    shown = plan.recommended or next((c for c in plan.candidates if not c.impossible), plan.candidates[0])
    console.print(_model_table(plan, shown.setup))
    for line in _model_notes(plan):
        console.print(f"[dim]{line}[/]", highlight=False)
    if not shown.impossible:
        console.print()
        console.print(memory_bar(plan, shown))
        console.print(_memory_table(plan, shown, stored or {}))
    console.print(_candidate_table(plan))
    if plan.recommended is None:
        console.print(
            f"[bold red]Nothing that this version runs fits this machine.[/] {closest(plan)}", highlight=False
        )
        return
    console.print("\nRun it with\n")
    console.print(f"  [bold]{plan.command(plan.recommended)}[/]", soft_wrap=True, highlight=False)


def _machine_line(machine: Machine) -> str:
    host = f"{gib(machine.host_bytes)} of host memory, {gib(machine.pinnable_bytes)} pinnable"
    source = "measured here" if machine.measured else "; ".join(machine.notes)
    if machine.gpu is None:
        return f"[bold]No GPU[/], {host}, {machine.host_read_gbps:.0f} GB/s and {machine.host_tflops:.2f} TFLOP/s ({source})"
    return (
        f"[bold]{machine.gpu}[/]: {gib(machine.gpu_bytes)}, {gib(machine.gpu_used)} taken; "
        f"reads {machine.read_gbps:,.0f} GB/s, {machine.tflops:,.0f} TFLOP/s, "
        f"link {machine.link_gbps:.1f} GB/s; {host} ({source})"
    )


def _model_table(plan: Plan, setup: Setup) -> Table:
    """What the model takes in every format, whatever the machine."""
    sizes, numbers = plan.sizes, plan.numbers
    whole = numbers.sizes
    total, active = whole.total_params / 1e9, whole.active_params / 1e9
    title = f"{numbers.architecture}: {total:.2f} G weights, {active:.2f} G active a token"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("the model")
    table.add_column("bytes", justify="right")
    for name, num_bytes in format_bytes(sizes, OFFERED, setup.dtype, setup.group_size).items():
        scales = num_bytes - value_bytes(sizes, name, setup.dtype) * sizes.num_experts * sizes.num_sparse
        of_scales = f" ({gib(scales)} of it scales)" if scales else ""
        label = str(setup.dtype).removeprefix("torch.") if name == "none" else name
        table.add_row(
            f"all {sizes.num_experts} x {sizes.num_sparse} experts as {label}", gib(num_bytes) + of_scales
        )
    for slots, num_bytes in cache_sizes(sizes, setup).items():
        table.add_row(f"a cache of {slots} experts a layer as {_format_name(setup)}", gib(num_bytes))
    per_token, context = sizes.kv_bytes_per_token(setup.dtype), plan.request.context
    if per_token:
        tokens = context * plan.request.concurrency
        table.add_row("KV cache, a token", f"{per_token:,} bytes")
        table.add_row(f"KV cache, {plan.request.concurrency} x {context:,} tokens", gib(per_token * tokens))
    return table


def _format_name(setup: Setup) -> str:
    return str(setup.dtype).removeprefix("torch.") if setup.weight_format == "none" else setup.weight_format


def _memory_table(plan: Plan, candidate: Candidate, stored: Mapping[str, int]) -> Table:
    """The pieces of the bar in numbers, beside what the checkpoint has of each."""
    setup = candidate.setup
    table = Table(title=f"Memory of {candidate.label}", title_justify="left")
    for name in ("part", "where", "weights", "bytes", *(["checkpoint"] if stored else [])):
        table.add_column(name, justify="left" if name in ("part", "where") else "right")
    rest = dict(stored)
    labels = {"workspace": f"workspace, steps of {setup.step_tokens:,} tokens"}
    for piece in breakdown(plan.sizes, setup, candidate.ledger):
        weights = f"{piece.num_params / 1e6:,.1f} M" if piece.num_params else ""
        row = [labels.get(piece.name, piece.name), piece.where, weights, gib(piece.num_bytes)]
        table.add_row(*row, *([gib(rest.pop(piece.name))] if piece.name in rest else []))
    if setup.on_cuda:
        table.add_row("CUDA context, other processes", "device", "", gib(plan.machine.gpu_used))
        reserve = plan.machine.gpu_bytes - _usable(plan, candidate)
        table.add_row("kept free by --memory-ratio", "device", "", gib(reserve))
    for name, num_bytes in rest.items():
        table.add_row(f"{name} in the checkpoint", "", "", "", gib(num_bytes))
    table.add_section()
    for where in ("device", "host"):
        if total := candidate.ledger.on(where):
            table.add_row("total", where, "", gib(total), style="bold")
    return table


def _usable(plan: Plan, candidate: Candidate) -> int:
    """Bytes of the device that --memory-ratio leaves to everybody: ours, what is left, and what others hold."""
    taken = candidate.ledger.on("device") + plan.machine.gpu_used
    return taken + (candidate.left if candidate.where == "device" else 0) - candidate.missing


def _model_notes(plan: Plan) -> list[str]:
    numbers, sizes = plan.numbers, plan.numbers.sizes
    notes = []
    if numbers.served:
        notes.append(
            f"{numbers.served} (served: {', '.join(FAMILIES)}); sizes are of the fields that are known"
        )
    notes += [f"not counted: {what}" for what in numbers.unknown]
    if numbers.stored_format:
        notes.append(f"the checkpoint is quantized ({numbers.stored_format})")
    setup = plan.candidates[0].setup
    read, full = (
        kv_read_bytes(sizes, setup, plan.request.context),
        plan.request.context * sizes.kv_bytes_per_token(setup.dtype),
    )
    if read < full:
        notes.append(f"sliding windows: attention reads {gib(read)} of the cache, which keeps {gib(full)}")
    if sizes.state_elements:
        state = sizes.state_elements * setup.dtype.itemsize
        notes.append(f"linear-attention layers keep {gib(state)} a request, whatever its length")
    return notes


def memory_bar(plan: Plan, candidate: Candidate) -> Group:
    """One line of blocks in the colours of the parts, and its legend."""
    on_device = candidate.setup.on_cuda
    where = "device" if on_device else "host"
    pieces = breakdown(plan.sizes, candidate.setup, candidate.ledger)
    parts = [(piece.name, piece.num_bytes) for piece in pieces if piece.where == where]
    if on_device and plan.machine.gpu_used:
        parts.append(("not ours", plan.machine.gpu_used))
    total = max(plan.machine.gpu_bytes if on_device else plan.machine.host_bytes, sum(n for _, n in parts))
    bar, legend = Text(), Text()
    used = 0
    for name, num_bytes in parts:
        start, used = used, used + num_bytes
        cells = round(BAR_WIDTH * used / total) - round(BAR_WIDTH * start / total)
        color = BAR_COLORS.get(name, "red")
        bar.append("█" * cells, style=color)
        legend.append("■ ", style=color).append(f"{name} {gib(num_bytes)}   ")
    bar.append("░" * (BAR_WIDTH - round(BAR_WIDTH * used / total)), style="bright_black")
    if total > used:
        legend.append(f"░ free {gib(total - used)}")
    return Group(Text(candidate.label, style="bold"), bar, legend)


def _candidate_table(plan: Plan) -> Table:
    prompt = min(plan.request.context, PREFILL_TOKENS)
    table = Table(title="Set-ups, the recommended one first; GiB", title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("experts" if plan.sizes.expert else "weights")
    for name in (
        "device",
        "host",
        "left",
        "KV\ntokens",
        "ms/token\ntext",
        "ms/token\nrandom",
        f"prefill\n{prompt:,}",
    ):
        table.add_column(name, justify="right")
    table.add_column("why")
    for candidate in plan.candidates:
        style = "bold green" if candidate is plan.recommended else "" if candidate.usable else "dim"
        if candidate.impossible:
            table.add_row(candidate.label, *[""] * 7, candidate.verdict, style=style)
            continue
        device, host = candidate.ledger.on("device"), candidate.ledger.on("host")
        left = candidate.left or -candidate.missing
        table.add_row(
            candidate.label,
            f"{device / 2**30:.1f}" if device else "",
            f"{host / 2**30:.1f}" if host else "",
            f"{left / 2**30:.1f}",
            f"{candidate.kv_tokens:,}" if candidate.fits else "",
            f"{candidate.local.decode_ms:.1f}",
            f"{candidate.worst.decode_ms:.1f}",
            f"{candidate.local.prefill_s:.1f} s",
            candidate.verdict,
            style=style,
        )
    return table


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Everything a plan says, in bytes, milliseconds and seconds; JSON-ready."""
    sizes, machine = plan.numbers.sizes, plan.machine
    setup = plan.candidates[0].setup
    return {
        "model": {
            "name": plan.request.model,
            "architecture": plan.numbers.architecture,
            "not_served": plan.numbers.served,
            "not_counted": list(plan.numbers.unknown),
            "checkpoint_format": plan.numbers.stored_format,
            "params": {**sizes.params, "experts": sizes.expert_params},
            "total_params": sizes.total_params,
            "active_params": sizes.active_params,
            "expert_bytes": format_bytes(sizes, OFFERED, setup.dtype, setup.group_size),
            "expert_cache_bytes": cache_sizes(sizes, setup),
            "kv_bytes_per_token": sizes.kv_bytes_per_token(setup.dtype),
        },
        "machine": {
            "gpu": machine.gpu,
            "gpu_bytes": machine.gpu_bytes,
            "gpu_used_bytes": machine.gpu_used,
            "read_gbps": machine.read_gbps,
            "tflops": machine.tflops,
            "link_gbps": machine.link_gbps,
            "host_bytes": machine.host_bytes,
            "pinnable_bytes": machine.pinnable_bytes,
            "measured": machine.measured,
            "notes": list(machine.notes),
        },
        "context": plan.request.context,
        "concurrency": plan.request.concurrency,
        "recommended": plan.command(plan.recommended) if plan.recommended else None,
        "candidates": [_candidate_dict(plan, candidate) for candidate in plan.candidates],
    }


def _candidate_dict(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    possible = candidate.impossible is None
    return {
        "label": candidate.label,
        "command": plan.command(candidate),
        "usable": candidate.usable,
        "verdict": candidate.verdict,
        "lacks": list(candidate.lacks),
        "lines": {line.name: line.num_bytes for line in candidate.ledger.lines},
        "pieces": {
            f"{piece.name} ({piece.where})": piece.num_bytes
            for piece in breakdown(plan.sizes, candidate.setup, candidate.ledger)
        },
        "missing_bytes": candidate.missing,
        "left_bytes": candidate.left,
        "kv_tokens": candidate.kv_tokens,
        "hit_rate": candidate.local.hit_rate,
        "hit_rate_random": candidate.worst.hit_rate,
        "decode_ms": candidate.local.decode_ms if possible else None,
        "decode_ms_random": candidate.worst.decode_ms if possible else None,
        "prefill_s": candidate.local.prefill_s if possible else None,
        "answer_s": candidate.local.answer_s if possible else None,
    }
