"""How `offload.py` shows its rows: lines for people, and a plot."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console


def show_prompt(row: dict[str, Any], console: Console) -> None:
    rate = row["bytes"] / row["s"] / 1e9
    line = f"prompt of {row['tokens']}: {row['s']:.3f} s, {row['bytes'] / 1e9:.2f} GB, {rate:.1f} GB/s, "
    if row["link_bytes_per_s"] and row["resident_s"]:
        on_link = row["bytes"] / row["link_bytes_per_s"]
        line += f"link alone {on_link:.3f} s, resident {row['resident_s']:.3f} s, "
    console.print(line + f"{row['kept']:.0%} of the cached experts kept", highlight=False)


HEAD = "format    slots  overlap      routing batch  ms/step   hits   GB/s     link    bound  x"


def show_decode(row: dict[str, Any], console: Console, header: bool) -> None:
    bound = row.get("bound_ms")
    if header:
        console.print(HEAD, style="bold", highlight=False)
    line = f"{row['format']:9} {row['slots']:5} {row['overlap']:>8} {row['routing']:>12} {row['batch']:5} {row['ms']:8.2f} "
    line += f"{row['hit_rate']:6.1%} {row['bytes'] / row['ms'] / 1e6:6.1f} "
    line += f"{row['link_ms']:8.2f} " if "link_ms" in row else f"{'-':>8} "
    console.print(line + (f"{bound:8.2f} {row['ms'] / bound:.2f}" if bound else f"{'-':>8}"), highlight=False)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Milliseconds a step beside the bound, one pair of bars a row."""
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "ms" in row]
    names = [f"{row['format']} {row['slots']}\n{row['routing']}\n{row['overlap']}" for row in rows]
    at = np.arange(len(rows))
    figure, axes = plt.subplots(figsize=(1 + 1.2 * len(rows), 4))
    axes.bar(at - 0.2, [row["ms"] for row in rows], 0.4, label="measured")
    axes.bar(at + 0.2, [row.get("bound_ms", 0.0) for row in rows], 0.4, label="bound")
    axes.set_xticks(at, names)
    axes.set_ylabel("ms a step")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
