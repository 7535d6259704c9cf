"""`minisgl env`: one report to paste into a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch

from minisgl import __version__
from minisgl.moe.store.pinned import gather_host_facts
from minisgl.planner.machine import this_machine

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "rich", "fastapi", "uvicorn",
    "pyzmq", "msgspec", "flashinfer-python",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "NCCL_DEBUG",
    "RANK",
    "WORLD_SIZE",
)
DRIVER_QUERY = "driver_version,pcie.link.gen.max,pcie.link.width.max"


def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `minisgl env`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-probe", action="store_true", help="do not measure link and memory bandwidth")


def run_env(args: argparse.Namespace) -> int:
    """Print the report; always 0."""
    report = gather_env(probe=not args.no_probe)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        width = max(map(len, report))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in report.items()))
    return 0


def gather_env(probe: bool = True) -> dict[str, Any]:
    """Versions, GPU, link, memory and limits, by name. probe: also measure bandwidths, in about half a second."""
    machine, host = this_machine(measure=probe), gather_host_facts()
    report: dict[str, Any] = {
        "minisgl": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        "host memory": f"{host.total / 2**30:.1f} GiB, {machine.host_bytes / 2**30:.1f} GiB available, "
        f"{machine.pinnable_bytes / 2**30:.1f} GiB pinnable" + (" (WSL2)" if host.wsl else ""),
        "limits": _limits(),
    }
    report |= {name: _version(name) for name in PACKAGES}
    report["CUDA"] = torch.version.cuda or "none"
    report["GPU"] = machine.gpu or "none"
    if machine.gpu:
        report["GPU memory"] = (
            f"{machine.gpu_bytes / 2**30:.2f} GiB, {machine.gpu_used / 2**30:.2f} GiB of it taken"
        )
        report["capability"] = ".".join(map(str, machine.capability))
        report["GPUs"] = machine.num_gpus
        report["driver"] = driver_report()
    if probe and machine.gpu:
        report["link"] = f"{machine.link_gbps:.1f} GB/s from pinned memory"
        report["GPU speed"] = f"{machine.read_gbps:,.0f} GB/s, {machine.tflops:,.0f} TFLOP/s"
    if probe:
        report["CPU speed"] = (
            f"{machine.host_read_gbps:.1f} GB/s, {machine.host_tflops:.2f} TFLOP/s in float32"
        )
    return report | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def driver_report() -> str:
    """Driver, and the widest PCIe link that card and slot agree on, from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: no nvidia-smi"
    words = [tool, f"--query-gpu={DRIVER_QUERY}", "--format=csv,noheader"]
    try:
        output = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    version, generation, width = (output.splitlines() or [", , "])[0].split(", ")
    return f"{version}, PCIe {generation} x{width}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _limits() -> str:
    """Resource limits that stop engines: locked memory, open files, shared memory."""
    try:
        import resource
    except ImportError:  # not on Windows
        return "unknown"

    def text(kind: int) -> str:
        soft = resource.getrlimit(kind)[0]
        return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"

    parts = [f"memlock {text(resource.RLIMIT_MEMLOCK)} bytes", f"open files {text(resource.RLIMIT_NOFILE)}"]
    try:
        shm = os.statvfs("/dev/shm")
        parts.append(f"/dev/shm {shm.f_bavail * shm.f_frsize / 2**30:.1f} GiB free")
    except OSError:
        parts.append("no /dev/shm")
    return ", ".join(parts)
