"""`minisgl convert`: quantize a model's experts once, so that it loads at the speed of the disk; `--check` verifies it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from minisgl.config import EngineConfig
from minisgl.flags import add_flags, iter_flags
from minisgl.models.checkpoints import ExpertChoice, open_checkpoint, stored_experts
from minisgl.models.checkpoints.converted import Manifest, check_sums, read_manifest
from minisgl.models.converting import convert
from minisgl.models.experts import expert_shape
from minisgl.models.registry import resolve_model
from minisgl.models.spec import ModelSpec

MODEL_FLAGS = ("model", "model_source", "revision", "offline")
EXPERT_FLAGS = ("moe_expert_quantization", "moe_quantization_group_size", "device")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `minisgl convert`."""
    parser.add_argument("--out", default=None, help="folder to write, which must not exist yet")
    parser.add_argument(
        "--check", action="store_true", help="verify every checksum of --out, or without it of --model"
    )
    fields = {item.name: item for _, item in iter_flags(EngineConfig)}
    add_flags(parser, [fields[name] for name in MODEL_FLAGS], "model")
    add_flags(parser, [fields[name] for name in EXPERT_FLAGS], "experts")


def run_convert(args: argparse.Namespace) -> int:
    """Convert, check, or both. Exit code 0, or ValueError with what is wrong."""
    given = vars(args)
    if "model" not in given:
        raise ValueError("--model is missing: name the model to convert, or the converted one to check")
    if args.out is None and not args.check:
        raise ValueError(
            "--out is missing: name the folder to write (or give --check to verify a converted model)"
        )
    config = EngineConfig.from_kwargs(
        **{name: given[name] for name in (*MODEL_FLAGS, *EXPERT_FLAGS) if name in given}
    )
    notes, model = Console(stderr=True), config.model
    folder = resolve_model(model.model, model.model_source, model.revision, offline=model.offline)
    if args.out is not None:
        out = Path(args.out).expanduser()
        _convert(config, folder, out, notes)
        folder = out
    if args.check:
        _check(folder, notes)
    return 0


def _convert(config: EngineConfig, folder: Path, out: Path, notes: Console) -> None:
    start, device = time.monotonic(), config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    choice = choose(config, folder)
    total = sum(weight.num_bytes for weight in open_checkpoint(folder).weights)
    columns = (
        TextColumn("converting"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        manifest = convert(
            folder, out, choice, torch.device(device), lambda num_bytes: bar.advance(task, num_bytes)
        )
    seconds, size = time.monotonic() - start, sum(entry.num_bytes for entry in manifest.files.values())
    notes.print(
        f"{out}: {choice.name} experts, {size / 1e9:.2f} GB written from {total / 1e9:.2f} GB in {seconds:.1f} s "
        f"({total / 1e9 / max(seconds, 1e-9):.2f} GB/s read)",
        highlight=False,
    )


def choose(config: EngineConfig, folder: Path) -> ExpertChoice:
    """The format that was asked for; without one the checkpoint's own. ValueError where that is plain."""
    kernel, spec = config.kernel, ModelSpec.from_folder(folder)
    own = stored_experts(folder, expert_shape(spec)) if spec.moe is not None else None
    asked = kernel.moe_expert_quantization
    if own is not None and asked in ("auto", own.name):
        return own
    if asked == "auto":
        raise ValueError(
            "the model's experts are plain: name a format, for example --moe-expert-quantization int4"
        )
    return ExpertChoice(asked, kernel.moe_quantization_group_size)


def _check(folder: Path, notes: Console) -> None:
    manifest: Manifest | None = read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder} is no converted model: make one with --out")
    if wrong := check_sums(folder, manifest):
        raise ValueError(
            f"{folder}: {', '.join(wrong)} changed since it was written: convert the model again"
        )
    notes.print(f"{folder}: all {len(manifest.files)} files are as they were written", highlight=False)
