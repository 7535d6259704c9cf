"""Measured choices on disk: JSON files keyed by GPU, Triton version and problem, some shipped with the package.

A record holds one choice for each power-of-two bucket of tokens that was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import triton

from minisgl.moe.base import Problem
from minisgl.moe.select import Choice, DeviceLimits, Record, Tiles, can_have_roles, without_roles
from minisgl.moe.workspace import next_power_of_two


def problem_key(problem: Problem) -> str:
    """One line that names a problem without its number of tokens."""
    shape = problem.shape
    of = f"of{problem.num_experts}" if problem.num_experts > problem.num_slots else ""
    bias = ",bias" if shape.bias else ""
    return (
        f"S{problem.num_slots}{of},K{problem.top_k},D{shape.model_dim},F{shape.hidden_dim}{bias},"
        f"{problem.format},g{problem.group_size},{str(problem.dtype).removeprefix('torch.')},{problem.activation}"
    )


class Records:
    """Measured choices by GPU and problem: those shipped with the package, and a folder of one's own.

    A file holds one GPU and one Triton version. Records of the running version win over those of others.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._entries: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}

    @staticmethod
    def default_folder() -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "minisgl" / "moe"

    def lookup(self, problem: Problem, limits: DeviceLimits) -> Record | None:
        """Bucket -> choice, or None if nothing was measured. For a rank's share of the experts what was measured with all,
        whose slots get as many rows. Where this Triton has no kernels whose warps have roles, the same tiles for the others.
        """
        entries, whole = self._of_gpu(limits.name), problem
        if problem.num_experts > problem.num_slots:
            whole = replace(problem, num_slots=problem.num_experts, num_experts=0)
        buckets = entries.get(problem_key(problem)) or entries.get(problem_key(whole))
        if not buckets:
            return None
        record = {bucket: choice_from_json(entry["choice"]) for bucket, entry in buckets.items()}
        if can_have_roles(problem, limits):
            return record
        return {bucket: without_roles(choice) for bucket, choice in record.items()}

    def add(self, problem: Problem, limits: DeviceLimits, choice: Choice, microseconds: float) -> None:
        buckets = self._of_gpu(limits.name).setdefault(problem_key(problem), {})
        entry = {"choice": asdict(choice), "us": round(microseconds, 2), "triton": triton.__version__}
        buckets[next_power_of_two(problem.num_tokens)] = entry
        if self.folder is not None:
            self.save(self.folder, limits.name)

    def save(self, folder: Path, gpu: str) -> Path:
        """Write this GPU's entries that were measured with the running Triton."""
        mine = {}
        for key, buckets in sorted(self._of_gpu(gpu).items()):
            kept = {str(b): e for b, e in sorted(buckets.items()) if e["triton"] == triton.__version__}
            if kept:
                mine[key] = kept
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_stem(gpu)}.triton-{triton.__version__}.json"
        content = {"gpu": gpu, "triton": triton.__version__, "problems": mine}
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def _of_gpu(self, gpu: str) -> dict[str, dict[int, dict[str, Any]]]:
        if gpu not in self._entries:
            entries: dict[str, dict[int, dict[str, Any]]] = {}
            for content in sorted(self._files(gpu), key=lambda c: c["triton"] == triton.__version__):
                for key, buckets in content["problems"].items():
                    entries.setdefault(key, {}).update({int(b): entry for b, entry in buckets.items()})
            self._entries[gpu] = entries
        return self._entries[gpu]

    def _files(self, gpu: str) -> Iterator[dict[str, Any]]:
        shipped = resources.files("minisgl.moe") / "tuned"
        folders = [shipped, *([self.folder] if self.folder is not None and self.folder.is_dir() else [])]
        for folder in folders:
            for file in folder.iterdir() if folder.is_dir() else ():
                if file.name.startswith(file_stem(gpu) + ".triton-") and file.name.endswith(".json"):
                    yield json.loads(file.read_text())


def file_stem(gpu: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in gpu)


def choice_from_json(content: dict[str, Any]) -> Choice:
    tiles = {gemm: Tiles(**content[gemm]) for gemm in ("gate_up", "down")}
    return Choice(content["kernel"], content["block_m"], **tiles)
