"""A plan for people (tables and a bar) and for programs (a dictionary that becomes JSON)."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from minisgl.models.sizes import PARTS, ModelSizes
from minisgl.models.spec import FAMILIES
from minisgl.planner.machine import Machine
from minisgl.planner.plan import PREFILL_TOKENS, Candidate, Plan, closest
from minisgl.planner.predict import kv_read_bytes
from minisgl.planner.units import gib

BAR_WIDTH = 72
BAR_COLORS = {
    "dense weights": "blue",
    "experts": "magenta",
    "KV pages": "green",
    "page table": "white",
    "workspace": "yellow",
    "CUDA graphs": "cyan",
    "one step": "bright_yellow",
    "not ours": "bright_black",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Machine, model, the recommended set-up with its bar, every other one, and the command to copy."""
    console.print(_machine_line(plan.machine), highlight=False)
    if plan.request.num_ranks > 1:
        console.print(
            f"What follows the model's table is for each of {plan.request.num_ranks} GPUs", highlight=False
        )
    console.print(_model_table(plan))
    for line in _model_notes(plan):
        console.print(f"[dim]{line}[/]", highlight=False)
    shown = plan.recommended or next((c for c in plan.candidates if not c.impossible), None)
    if shown is not None:
        console.print()
        console.print(memory_bar(plan, shown))
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


def _model_table(plan: Plan) -> Table:
    sizes, numbers = plan.numbers.sizes, plan.numbers
    total, active = sizes.total_params / 1e9, sizes.active_params / 1e9
    title = f"{numbers.architecture}: {total:.2f} G weights, {active:.2f} G active a token"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("part", "weights", "bytes"):
        table.add_column(name, justify="left" if name == "part" else "right")
    setup = (plan.recommended or plan.candidates[0]).setup
    for part in PARTS:
        if count := sizes.params[part]:
            table.add_row(part, f"{count / 1e6:,.1f} M", gib(count * setup.dtype.itemsize))
    for name, num_bytes, scales in expert_bytes(sizes, setup.dtype, setup.group_size):
        of_scales = f" ({gib(scales)} of it scales and padding)" if scales else ""
        table.add_row(f"experts as {name}", f"{sizes.expert_params / 1e6:,.1f} M", gib(num_bytes) + of_scales)
    per_token, context = sizes.kv_bytes_per_token(setup.dtype), plan.request.context
    if per_token:
        tokens = context * plan.request.concurrency
        table.add_row("KV cache, a token", "", f"{per_token:,} bytes")
        table.add_row(
            f"KV cache, {plan.request.concurrency} x {context:,} tokens", "", gib(per_token * tokens)
        )
    return table


def expert_bytes(sizes: ModelSizes, dtype: torch.dtype, group_size: int = 128) -> list[tuple[str, int, int]]:
    """(format, bytes of all experts, of which scales, biases and padding) for every format that can store them."""
    rows = []
    for name in ("none", "int8", "fp8", "fp8_block", "int4", "mxfp4"):
        try:
            record = sizes.record_bytes(name, dtype, group_size)
        except ValueError:
            continue
        bits = {"none": 8 * dtype.itemsize, "int4": 4, "mxfp4": 4}.get(name, 8)
        count = sizes.num_experts * sizes.num_sparse
        if count:
            label = str(dtype).removeprefix("torch.") if name == "none" else name
            rows.append((label, record * count, (record - sizes.params_per_expert * bits // 8) * count))
    return rows


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
    parts = [(line.name, line.num_bytes) for line in candidate.ledger.lines if line.where == where]
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
            "expert_bytes": {
                name: num_bytes for name, num_bytes, _ in expert_bytes(sizes, setup.dtype, setup.group_size)
            },
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
        "missing_bytes": candidate.missing,
        "left_bytes": candidate.left,
        "kv_tokens": candidate.kv_tokens,
        "hit_rate": candidate.local.hit_rate,
        "hit_rate_random": candidate.worst.hit_rate,
        "decode_ms": candidate.local.decode_ms if possible else None,
        "decode_ms_random": candidate.worst.decode_ms if possible else None,
        "prefill_s": candidate.local.prefill_s if possible else None,
    }
