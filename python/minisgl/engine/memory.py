"""One ledger of every byte, and how many KV pages fit beside the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table

GIB = 2**30
CPU_KV_TOKENS = 32_768  # pages of a CPU run that names no --num-pages: four long conversations
CPU_KV_SHARE = 0.25  # of available host memory, at most


@dataclass(frozen=True)
class LedgerLine:
    """What something occupies. where: "device" or "host"."""

    name: str
    num_bytes: int
    where: str = "device"


@dataclass(frozen=True)
class Ledger:
    """Everything the engine allocated; lines add up to its total."""

    lines: tuple[LedgerLine, ...]

    @property
    def total(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    def table(self) -> Table:
        """For people."""
        table = Table(title="Memory", title_justify="left")
        table.add_column("what")
        table.add_column("where")
        table.add_column("MiB", justify="right")
        for line in self.lines:
            table.add_row(line.name, line.where, f"{line.num_bytes / 2**20:,.1f}")
        table.add_row("total", "", f"{self.total / 2**20:,.1f}", style="bold")
        return table


def pages_on_cuda(device: torch.device, memory_ratio: float, page_bytes: int) -> int:
    """KV pages that fit into memory_ratio of the device's memory beside the peak of what was allocated so far.

    Call it after a forward pass of the largest step, so that the peak holds weights, workspace and activations. Memory that
    other processes hold counts as used. Raises ValueError with the missing bytes when not even two pages fit.
    """
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    others = total - free - ours
    budget = int(total * memory_ratio) - others - torch.cuda.max_memory_allocated(device)
    if budget < 2 * page_bytes:
        raise ValueError(
            f"no memory is left for the KV cache: --memory-ratio {memory_ratio} of {total / GIB:.1f} GiB is used up by weights "
            f"and workspace ({torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB) and other processes ({others / GIB:.1f} "
            "GiB). Raise --memory-ratio, lower --max-prefill-length, or quantize with --moe-expert-quantization"
        )
    return budget // page_bytes


def pages_on_cpu(page_bytes: int, page_size: int, max_seq_len: int, available_bytes: int) -> int:
    """KV pages of a CPU run: for CPU_KV_TOKENS or one longest sequence, within a share of the available host memory."""
    wanted = -(-max(CPU_KV_TOKENS, max_seq_len) // page_size) + 1
    return max(2, min(wanted, int(available_bytes * CPU_KV_SHARE) // page_bytes))


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping, from /proc/meminfo; 8 GiB where there is none (macOS, Windows)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * GIB
