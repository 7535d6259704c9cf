"""Every set-up that a model could run in on a machine, each with its memory and speed, and which one to take.

A set-up is an expert format, where the experts live (device, part of them in a cache, or all on the CPU) and the size of a
step; `candidates` makes them. Here they are compared, and put into words.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine.memory import Ledger, Setup
from minisgl.flags import flag_names, iter_flags
from minisgl.models.sizes import ModelSizes
from minisgl.planner.machine import Machine
from minisgl.planner.numbers import ModelNumbers
from minisgl.planner.predict import Speed
from minisgl.planner.units import gib

PRECISION = ("none", "int8", "fp8_block", "fp8", "int4_asym", "int4", "mxfp4")
"""Expert formats, the most precise first."""
OFFERED = tuple(name for name in PRECISION if name != "int4_asym")  # which only checkpoints have
WORTH = (
    1.25  # how many times faster a less precise format must be to be recommended over one that fits as well
)
CACHE_WORTH = 1.1  # and a cache of experts, whose hits are a guess, than having all of them on the device
PREFILL_TOKENS = 8192  # prompt whose prefill time is told, unless --context is shorter

_FLAGS = {item.name: flag_names(item)[0] for _, item in iter_flags(EngineConfig)}


@dataclass(frozen=True)
class Request:
    """What is asked. model: as on the command line. context: tokens of each of `concurrency` requests.

    given: engine options that were set explicitly and are never changed, the number of ranks among them. command: the words
    before the flags of a command line to copy; "LLM" for a call in Python.
    """

    model: str
    context: int = 32_768
    concurrency: int = 1
    given: Mapping[str, Any] = field(default_factory=dict)
    command: str = "python -m minisgl serve"

    @property
    def num_ranks(self) -> int:
        """GPUs that share the model."""
        return int(self.given.get("tensor_parallel_size", 1))

    @property
    def expert_parallel(self) -> bool:
        """Whether each of them has whole experts, not a slice of every one."""
        return int(self.given.get("expert_parallel_size", 1)) > 1


@dataclass(frozen=True)
class Candidate:
    """One set-up. options: the engine options that make it, beside those given. lacks: reasons why this version can't run it.

    missing: bytes by which it does not fit, 0 if it does; where: the memory that is short, or that is left. left: bytes left.
    kv_tokens: tokens that fit into the KV cache if it gets what is left. local, worst: speed for text and for random routing.
    impossible: why this set-up can't exist at all, None if it can; then ledger is empty.
    """

    label: str
    options: Mapping[str, Any]
    setup: Setup
    ledger: Ledger
    missing: int
    left: int
    where: str
    kv_tokens: int
    local: Speed
    worst: Speed
    lacks: tuple[str, ...] = ()
    impossible: str | None = None
    verdict: str = ""

    @property
    def fits(self) -> bool:
        return self.missing == 0 and self.impossible is None

    @property
    def usable(self) -> bool:
        """Whether this version runs it on this machine."""
        return self.fits and not self.lacks


@dataclass(frozen=True)
class Plan:
    """Candidates, the recommended one first; recommended is None where nothing that this version runs fits.

    sizes: of one rank. machine: a rank's, with its share of the host's memory.
    """

    request: Request
    numbers: ModelNumbers
    sizes: ModelSizes
    machine: Machine
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None

    def command(self, candidate: Candidate) -> str:
        """The command line of a candidate, to copy, or the call in Python."""
        model = self.request.model
        if model.endswith(".json") and Path(model).is_file():
            model = str(Path(model).parent)  # a plan reads a config.json; to run, its folder is what to name
        options = {**self.request.given, **candidate.options}
        if self.request.command == "LLM":
            return (
                f"LLM({', '.join([repr(model), *(f'{k}={v!r}' for k, v in options.items() if k in _FLAGS)])})"
            )
        words = [*self.request.command.split(), "--model", shlex.quote(model)]
        return " ".join(words + option_words(options))


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Engine options as command-line words, in the order of the flags."""
    words = []
    for name, flag in _FLAGS.items():
        if name == "model" or name not in options:
            continue
        value = options[name]
        if isinstance(value, (tuple, list)):
            value = ",".join(map(str, value))
        if value is not False and value is not None:
            words += [flag] if value is True else [flag, shlex.quote(str(value))]
    return words


def recommend(candidates: Sequence[Candidate]) -> Candidate | None:
    """The most precise usable format, unless a less precise one is WORTH times faster; of one format the fastest set-up.

    Faster: to answer a prompt with ANSWER_TOKENS tokens, so that a prompt in many small steps counts too.
    """

    def seconds(candidate: Candidate) -> float:
        return candidate.local.answer_s * (CACHE_WORTH if candidate.setup.offloaded else 1.0)

    best = None
    for weight_format in PRECISION:
        usable = [c for c in candidates if c.usable and c.setup.weight_format == weight_format]
        if not usable:
            continue
        fastest = min(usable, key=seconds)
        if best is None or seconds(fastest) * WORTH <= seconds(best):
            best = fastest
    return best


def ranked(candidates: Sequence[Candidate], best: Candidate | None) -> tuple[Candidate, ...]:
    """All of them with their verdicts, the recommended one first."""
    in_order = sorted(candidates, key=lambda c: _rank(c, best))
    return tuple(replace(c, verdict=_verdict(c, best)) for c in in_order)


def _rank(candidate: Candidate, best: Candidate | None) -> tuple[int, float]:
    """Recommended, then what runs, then what will run, then what is too large by how much, then what can't be."""
    if candidate is best:
        return 0, 0.0
    if candidate.impossible:
        return 4, 0.0
    if not candidate.fits:
        return 3, candidate.missing
    return (1 if candidate.usable else 2), candidate.local.answer_s


def _verdict(candidate: Candidate, best: Candidate | None) -> str:
    """Why this one is, or is not, the one to take."""
    if candidate.impossible:
        return f"impossible: {candidate.impossible}"
    if not candidate.fits:
        return f"lacks {gib(candidate.missing)} of {candidate.where} memory"
    if candidate.lacks:
        return f"fits; {candidate.lacks[0]}"
    assert best is not None
    if candidate is best:
        return "recommended"
    ratio = candidate.local.answer_s / best.local.answer_s
    order = PRECISION.index(candidate.setup.weight_format) - PRECISION.index(best.setup.weight_format)
    if order > 0 and ratio < 1.05:
        gain = 100 * (1 / ratio - 1)
        return f"less precise, and only {gain:.0f} % faster" if gain >= 1 else "less precise, and no faster"
    words = f"{ratio:.1f} x slower" if ratio >= 1.0 else f"{1 / ratio:.1f} x faster"
    if 0.95 < ratio < 1.05:
        words = "as fast"
    return (
        f"less precise, and {words}"
        if order > 0
        else f"more precise, but {words}"
        if order < 0 and ratio >= 1.05
        else words
    )


def closest(plan: Plan) -> str:
    """What the set-up that needs least still lacks."""
    if plan.numbers.served:
        return "It can't run this model at all; the set-ups say what the model takes"
    runnable = [c for c in plan.candidates if not c.impossible and not c.lacks]
    if not runnable:
        return f"The first would be {plan.candidates[0].label}: {plan.candidates[0].verdict}"
    least = min(runnable, key=lambda c: c.missing)
    lacks = f"The smallest, {least.label}, lacks {gib(least.missing)} of {least.where} memory"
    pages = least.ledger.line("KV pages")
    if least.where != "device" or least.missing >= pages:
        return lacks
    context = int(plan.request.context * (1 - least.missing / pages)) // 256 * 256
    return f"{lacks}; with a context of {context:,} tokens it fits" if context else lacks
