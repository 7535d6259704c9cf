"""What a machine can hold and how fast it moves bytes: this one, measured in about half a second, or one that is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F

from minisgl.engine.memory import CONTEXT_BYTES, GIB
from minisgl.moe.store.pinned import HostFacts, gather_host_facts, pin_budget
from minisgl.planner.gpus import Gpu, find_gpu

PROBE_SECONDS = 0.2
FALLBACK_GPU = Gpu("a GPU of unknown speed", 0, 500, 50, 31.5, (8, 6))


@dataclass(frozen=True)
class Machine:
    """One machine. Bytes are bytes, rates GB/s (10^9), tflops TFLOP/s of 16-bit (on a CPU: 32-bit) matrix products.

    gpu: its name, None without one. gpu_bytes: all of its memory; gpu_used: what the CUDA context and others hold.
    read_gbps: what a kernel gets when it reads device memory. link_gbps: host to device from pinned memory by the copy engine.
    host_bytes: available without swapping; pinnable_bytes: of these, what may be page-locked. host_read_gbps, host_tflops: of
    PyTorch on the CPU, 0 where unknown. num_gpus: how many there are of these. measured: False for numbers from data sheets.
    notes: where numbers come from.
    """

    gpu: str | None
    gpu_bytes: int
    gpu_used: int
    capability: tuple[int, int]
    read_gbps: float
    tflops: float
    link_gbps: float
    host_bytes: int
    pinnable_bytes: int
    host_read_gbps: float
    host_tflops: float
    num_gpus: int = 1
    measured: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSheetShares:
    """How much of its data-sheet rates a GPU was measured to reach, where both are known."""

    read: float
    matmul: float
    link: float


def named_machine(
    name: str | None, gpu_bytes: int | None, host_bytes: int | None, shares: DataSheetShares
) -> Machine:
    """A machine with the GPU called `name`; data-sheet rates times `shares`. gpu_bytes None: as the data sheet says.

    Host memory is this machine's where host_bytes is None; the rates of a CPU that isn't here are unknown and stay 0. Raises
    ValueError for an unknown name.
    """
    gpu = find_gpu(name) if name else FALLBACK_GPU
    here = gather_host_facts()
    host = host_bytes or here.available
    rates = (
        f"rates of {gpu.name} are shares of its data sheet, and its link is taken to be as wide as the card's"
    )
    if not name:
        rates = f"no --gpu was named: assuming {gpu.read_gbps:.0f} GB/s, {gpu.tflops:.0f} TFLOP/s and a PCIe 4 x16 link"
    return Machine(
        gpu=gpu.name,
        gpu_bytes=gpu_bytes or int(gpu.memory_gib * GIB),
        gpu_used=CONTEXT_BYTES,
        capability=gpu.capability,
        read_gbps=gpu.read_gbps * shares.read,
        tflops=gpu.tflops * shares.matmul,
        link_gbps=gpu.link_gbps * shares.link,
        host_bytes=host,
        pinnable_bytes=pinnable(replace(here, total=host, available=host) if host_bytes else here),
        host_read_gbps=0.0,
        host_tflops=0.0,
        notes=(rates,),
    )


def this_machine(measure: bool = True) -> Machine:
    """What is here. measure: time copies and products for about half a second in all, once a process, else rates are zero."""
    host = gather_host_facts()
    read, flops = _host_rates() if measure else (0.0, 0.0)
    machine = Machine(
        gpu=None,
        gpu_bytes=0,
        gpu_used=0,
        capability=(0, 0),
        read_gbps=0.0,
        tflops=0.0,
        link_gbps=0.0,
        host_bytes=host.available,
        pinnable_bytes=pinnable(host),
        host_read_gbps=read,
        host_tflops=flops,
        measured=True,
        notes=("measured here",) if measure else (),
    )
    if not torch.cuda.is_available():
        return machine
    free, total = torch.cuda.mem_get_info()
    machine = replace(
        machine,
        gpu=torch.cuda.get_device_name(),
        gpu_bytes=total,
        gpu_used=total - free - torch.cuda.memory_reserved(),
        capability=torch.cuda.get_device_capability(),
        num_gpus=torch.cuda.device_count(),
    )
    if not measure:
        return machine
    read, flops, link = _device_rates()
    return replace(machine, read_gbps=read, tflops=flops, link_gbps=link)


def limited(machine: Machine, gpu_bytes: int) -> Machine:
    """The same machine with a card of `gpu_bytes`, which is this process's alone (`engine.memory.cuda_budget`)."""
    if machine.gpu is None:
        return machine
    free = machine.gpu_bytes - machine.gpu_used
    used = max(CONTEXT_BYTES, gpu_bytes - free)
    return replace(machine, gpu_bytes=gpu_bytes, gpu_used=used)


def pinnable(host: HostFacts) -> int:
    """Bytes of host memory that may be page-locked, as the engine decides it (`moe.store.pinned.pin_budget`): all that is
    available but 2 GiB on Linux, and at most half of all on WSL2.
    """
    return min(pin_budget(amount, host)[0] for amount in (host.available, host.total))


@cache
def _host_rates() -> tuple[float, float]:
    return _host_read_gbps(), _host_tflops()


@cache
def _device_rates() -> tuple[float, float, float]:
    """(GB/s, TFLOP/s, GB/s of the link). The probes' memory is given back: whoever asks may be about to fill the device."""
    rates = _device_gbps(torch.cuda.mem_get_info()[0]), _device_tflops(), measure_link()
    torch.cuda.empty_cache()
    return rates


def measure_link(num_bytes: int = 2**26) -> float:
    """GB/s of copies from pinned host memory to the device, over about PROBE_SECONDS. Needs a CUDA device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / _seconds(lambda: target.copy_(source, non_blocking=True), on_device=True) / 1e9


def _device_gbps(free: int) -> float:
    """Reads and writes of a copy inside of the device, both counted, which is about what a reading kernel gets."""
    size = min(2**28, free // 8)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), on_device=True, seconds=0.05) / 1e9


def _device_tflops(size: int = 4096) -> float:
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    a = torch.zeros((size, size), dtype=dtype, device="cuda")
    return 2 * size**3 / _seconds(lambda: a @ a, on_device=True, seconds=0.05) / 1e12


def _host_read_gbps(rows: int = 8192, columns: int = 2048) -> float:
    """Bytes/s at which PyTorch multiplies a float32 matrix by a vector: what decoding on a CPU is made of."""
    weight, x = torch.zeros((rows, columns)), torch.zeros((1, columns))
    return weight.nbytes / _seconds(lambda: F.linear(x, weight), seconds=0.05) / 1e9


def _host_tflops(size: int = 768) -> float:
    a = torch.zeros((size, size))
    return 2 * size**3 / _seconds(lambda: a @ a, seconds=0.05) / 1e12


def _seconds(call: Callable[[], object], on_device: bool = False, seconds: float = PROBE_SECONDS) -> float:
    """Seconds a call takes on average, after one that is not counted."""
    wait = torch.cuda.synchronize if on_device else lambda: None
    call()
    wait()
    start, calls, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds or calls < 2:
        call()
        calls += 1
        if calls % 4 == 0 or not on_device:
            wait()
        elapsed = time.perf_counter() - start
    wait()
    return (time.perf_counter() - start) / calls
