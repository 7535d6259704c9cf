"""Measured choices on disk: JSON files keyed by GPU, Triton version and problem, some shipped with the package.

A record holds one choice for each power-of-two bucket of tokens that was measured, and where that needs kernels that not every
Triton has ("choice"), the best of the others, too ("elsewhere").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton

from minisgl.moe.base import Problem
from minisgl.moe.select import (
    PACKED_FORMATS,
    Choice,
    DeviceLimits,
    Record,
    Tiles,
    can_be_persistent,
    can_have_roles,
    grouped_heuristic,
)
from minisgl.moe.workspace import next_power_of_two

if TYPE_CHECKING:
    from importlib.abc import Traversable

Entries = dict[str, dict[int, dict[str, Any]]]
"""Problem -> bucket of tokens -> what was measured."""


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

    A file holds one GPU and one Triton version. Records of the running version win over those of others, and the folder's
    over those shipped. The folder never gets a copy of what is shipped, which would hide what a later package ships.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._entries: dict[str, Entries] = {}
        self._own: dict[str, Entries] = {}

    @staticmethod
    def default_folder() -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "minisgl" / "moe"

    def lookup(self, problem: Problem, limits: DeviceLimits) -> Record | None:
        """Bucket -> choice, or None if nothing was measured. For a rank's share of the experts what was measured with all,
        whose slots get as many rows. Where this Triton has no kernels whose warps have roles, tiles for the others.
        """
        entries, whole = self._of_gpu(limits.name), problem
        if problem.num_experts > problem.num_slots:
            whole = replace(problem, num_slots=problem.num_experts, num_experts=0)
        buckets = entries.get(problem_key(problem)) or entries.get(problem_key(whole))
        if not buckets:
            return None
        return {
            bucket: _possible(entry, replace(problem, num_tokens=bucket), limits)
            for bucket, entry in buckets.items()
        }

    def add(self, problem: Problem, limits: DeviceLimits, choice: Choice, microseconds: float) -> None:
        entry = {"choice": asdict(choice), "us": round(microseconds, 2), "triton": triton.__version__}
        for entries in (self._of_gpu(limits.name), self._own_of_gpu(limits.name)):
            entries.setdefault(problem_key(problem), {})[next_power_of_two(problem.num_tokens)] = entry
        if self.folder is not None:
            self.save(self.folder, limits.name)

    def save(self, folder: Path, gpu: str) -> Path:
        """Write this GPU's own entries that were measured with the running Triton."""
        mine = {}
        for key, buckets in sorted(self._own_of_gpu(gpu).items()):
            kept = {str(b): e for b, e in sorted(buckets.items()) if e["triton"] == triton.__version__}
            if kept:
                mine[key] = kept
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_stem(gpu)}.triton-{triton.__version__}.json"
        content = {"gpu": gpu, "triton": triton.__version__, "problems": mine}
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def _of_gpu(self, gpu: str) -> Entries:
        if gpu not in self._entries:
            shipped = resources.files("minisgl.moe") / "tuned"
            self._entries[gpu] = _read(gpu, [shipped, *self._folders()])
        return self._entries[gpu]

    def _own_of_gpu(self, gpu: str) -> Entries:
        if gpu not in self._own:
            self._own[gpu] = _read(gpu, self._folders())
        return self._own[gpu]

    def _folders(self) -> list[Path]:
        return [self.folder] if self.folder is not None and self.folder.is_dir() else []


def without_roles(choice: Choice, problem: Problem, limits: DeviceLimits) -> Choice:
    """The same tiles for the kernels whose warps are all alike; of 4-bit weights, which they couldn't hold, the heuristic's."""
    if not (choice.gate_up.roles or choice.down.roles):
        return choice
    if problem.format in PACKED_FORMATS:
        return grouped_heuristic(problem, replace(limits, gluon=False))

    def alike(tiles: Tiles) -> Tiles:
        return replace(tiles, roles=False, num_warps=8) if tiles.roles else tiles

    return replace(choice, gate_up=alike(choice.gate_up), down=alike(choice.down))


def _possible(entry: dict[str, Any], problem: Problem, limits: DeviceLimits) -> Choice:
    choice = choice_from_json(entry["choice"])
    persistent = choice.kernel == "persistent"
    if can_be_persistent(problem, limits) if persistent else can_have_roles(problem, limits):
        return choice
    if "elsewhere" in entry:
        choice = choice_from_json(entry["elsewhere"])
    elif persistent:
        choice = grouped_heuristic(problem, limits)
    return without_roles(choice, problem, limits)


def _read(gpu: str, folders: Sequence[Traversable]) -> Entries:
    """What files of a GPU say; a later folder wins, and the running Triton over all."""
    entries: Entries = {}
    for content in sorted(_files(gpu, folders), key=lambda c: c["triton"] == triton.__version__):
        for key, buckets in content["problems"].items():
            entries.setdefault(key, {}).update({int(b): entry for b, entry in buckets.items()})
    return entries


def _files(gpu: str, folders: Sequence[Traversable]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.startswith(file_stem(gpu) + ".triton-") and file.name.endswith(".json"):
                yield json.loads(file.read_text())


def file_stem(gpu: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in gpu)


def choice_from_json(content: dict[str, Any]) -> Choice:
    tiles = {gemm: Tiles(**content[gemm]) for gemm in ("gate_up", "down")}
    return Choice(content["kernel"], content["block_m"], **tiles)
