"""Every set-up that a model could run in on a machine, each with its memory and speed, and which one to take.

A set-up is an expert format, where the experts live (device, part of them in a cache, or all on the CPU) and the size of a
step. Each is turned into a real configuration by `resolve.resolve` and into bytes by `engine.memory`, so that a recommended
command line is one the engine accepts and the bytes are those it will allocate.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine.memory import CPU_KV_SHARE, CPU_KV_TOKENS, Ledger, Setup, predict_ledger, setup_of
from minisgl.flags import flag_names, iter_flags
from minisgl.models.sizes import ModelSizes, shard_sizes
from minisgl.moe.formats import get_format
from minisgl.planner.features import lacking
from minisgl.planner.machine import Machine
from minisgl.planner.numbers import ModelNumbers
from minisgl.planner.predict import Speed, predict_speed
from minisgl.planner.units import gib
from minisgl.resolve import Facts, resolve

PRECISION = ("none", "int8", "fp8_block", "fp8", "int4", "mxfp4")
"""Expert formats, the most precise first."""
WORTH = (
    1.25  # how many times faster a less precise format must be to be recommended over one that fits as well
)
STEPS = ((8192, 256), (4096, 64), (2048, 32), (512, 8))
"""(--max-prefill-length, --max-running-requests) to try: smaller steps leave more memory to weights and KV pages."""
HOST_SHARE = 0.9  # of available host memory that a CPU run may take
PREFILL_TOKENS = 8192  # prompt whose prefill time is told, unless --context is shorter
FP8_CAPABILITY = (8, 9)

_FLAGS = {item.name: flag_names(item)[0] for _, item in iter_flags(EngineConfig)}
_FUTURE_FLAGS = {
    "moe_expert_offload": "--moe-expert-offload",
    "moe_expert_cache_size": "--moe-expert-cache-size",
}


@dataclass(frozen=True)
class Request:
    """What is asked. model: as on the command line. context: tokens of each of `concurrency` requests.

    given: engine options that were set explicitly and are never changed. num_ranks, expert_parallel: GPUs, and how experts are
    divided among them. command: the words before the flags of a command line to copy.
    """

    model: str
    context: int = 32_768
    concurrency: int = 1
    given: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    expert_parallel: bool = False
    command: str = "python -m minisgl serve"


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
    """Candidates, the recommended one first; recommended is None where nothing that this version runs fits."""

    request: Request
    numbers: ModelNumbers
    sizes: ModelSizes
    machine: Machine
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None

    def command(self, candidate: Candidate) -> str:
        """The command line of a candidate, to copy."""
        words = [*self.request.command.split(), "--model", shlex.quote(self.request.model)]
        return " ".join(words + option_words({**self.request.given, **candidate.options}))


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Engine options as command-line words, in the order of the flags."""
    names = {**_FLAGS, **_FUTURE_FLAGS}
    words = []
    for name, flag in names.items():
        if name in options and name != "model":
            value = options[name]
            words += [flag] if value is True else [flag, shlex.quote(str(value))]
    return words


def make_plan(numbers: ModelNumbers, machine: Machine, request: Request) -> Plan:
    """All set-ups of the model on the machine, ranked. Raises ValueError for options that can't work."""
    sizes = shard_sizes(numbers.sizes, request.num_ranks, request.expert_parallel)
    context = min(request.context, numbers.sizes.context_length)
    request = replace(request, context=context)
    build = _Builder(numbers, sizes, machine, request)
    candidates = [c for weight_format in build.formats() for c in build.candidates(weight_format)]
    if not candidates:
        raise ValueError(
            "nothing to plan for: this machine has no GPU, and the CPU was not measured or is ruled out"
        )
    best = recommend(candidates)
    ranked = sorted(candidates, key=lambda c: _rank(c, best))
    ranked = [replace(c, verdict=_verdict(c, best)) for c in ranked]
    return Plan(request, numbers, sizes, machine, tuple(ranked), ranked[0] if best else None)


class _Builder:
    """Makes the candidates of one model, machine and request."""

    def __init__(self, numbers: ModelNumbers, sizes: ModelSizes, machine: Machine, request: Request) -> None:
        self.numbers, self.sizes, self.machine, self.request = numbers, sizes, machine, request
        self.features = {"tensor-parallel"} if request.num_ranks > 1 else set()
        if request.num_ranks > 1 and request.expert_parallel:
            self.features.add("expert-parallel")
        if numbers.stored_format:
            self.features.add("quantized-checkpoint")

    def formats(self) -> Sequence[str]:
        stored, given = self.numbers.stored_format, self.request.given.get("moe_expert_quantization")
        if self.sizes.expert is None:
            return ("none",)
        if given:
            return (given,)
        return (stored,) if stored in PRECISION else PRECISION

    def candidates(self, weight_format: str) -> list[Candidate]:
        """Resident on the device, with caches of several sizes, and on the CPU."""
        by_itself = ("none", self.numbers.stored_format)  # what the engine takes when it is not told
        options = {"moe_expert_quantization": weight_format} if weight_format not in by_itself else {}
        device, out = self.request.given.get("device", "auto"), []
        if self.machine.gpu and device != "cpu":
            resident = self._best_step(options, None)
            out.append(resident)
            if self.sizes.expert and not resident.impossible:
                out += self._caches(options, room=resident)
        means_gpu = device == "cuda" or "gpu_memory_limit" in self.request.given
        if self.machine.host_read_gbps and not means_gpu and self.request.num_ranks == 1:
            out.append(self._best_step({**options, **({"device": "cpu"} if self.machine.gpu else {})}, None))
        return out

    def _caches(self, options: Mapping[str, Any], room: Candidate) -> list[Candidate]:
        """Expert caches: a quarter, a half and three quarters of the experts, and the most that fits if not all do."""
        num_experts, floor = self.sizes.num_experts, min(2 * self.sizes.top_k, self.sizes.num_experts - 1)
        per_slot = self.sizes.num_sparse * self.sizes.record_bytes(
            room.setup.weight_format, room.setup.dtype, room.setup.group_size
        )
        most = num_experts - -(-room.missing // per_slot)
        wanted = {max(floor, num_experts * share // 4) for share in (1, 2, 3)}
        if floor <= most < num_experts:
            wanted = {slots for slots in wanted if slots < most} | {most}
        return [self._best_step(options, slots) for slots in sorted(wanted, reverse=True)]

    def _best_step(self, options: Mapping[str, Any], num_slots: int | None) -> Candidate:
        """The candidate with the largest step that fits; with the smallest one if none does."""
        given = self.request.given
        candidate = None
        for prefill, running in STEPS:
            step: dict[str, Any] = {}
            if (prefill, running) != STEPS[0] and "max_prefill_length" not in given:
                step["max_prefill_length"] = prefill
            if (prefill, running) != STEPS[0] and "max_running_requests" not in given:
                step["max_running_requests"] = max(running, self.request.concurrency)
            candidate = self._candidate({**options, **step}, num_slots)
            if candidate.fits or candidate.impossible:
                break
        assert candidate is not None
        return candidate

    def _resolve(self, options: Mapping[str, Any], num_slots: int | None) -> tuple[EngineConfig, Setup]:
        """The configuration that would run, and what it means for memory with room for the context that was asked."""
        request, capability = self.request, self.machine.capability
        facts = Facts(
            has_cuda=self.machine.gpu is not None,
            has_bf16=capability >= (8, 0),
            checkpoint_dtype=str(self.numbers.dtype).removeprefix("torch."),
            context_length=self.numbers.sizes.context_length,
            expert_format=self.numbers.stored_format if self.numbers.stored_format in PRECISION else "none",
        )
        given = {name: value for name, value in request.given.items() if name != "tensor_parallel_size"}
        config, _ = resolve(EngineConfig.from_kwargs(**{**given, **options, "model": request.model}), facts)
        pages = request.concurrency * -(-request.context // config.cache.page_size) + 1
        return config, replace(setup_of(config, pages), num_slots=num_slots)

    def _lacks(self, num_slots: int | None) -> tuple[str, ...]:
        """Why this version can't run it, whatever memory there is."""
        features = self.features | ({"expert-offload"} if num_slots is not None else set())
        unserved = ["this architecture is not served"] if self.numbers.served else []
        return (*unserved, *lacking(frozenset(features)))

    def _candidate(self, options: Mapping[str, Any], num_slots: int | None) -> Candidate:
        request, sizes, machine = self.request, self.sizes, self.machine
        config, setup = self._resolve(options, num_slots)
        shown, label, lacks = dict(options), self._label(setup), self._lacks(num_slots)
        if num_slots is not None:
            shown |= {"moe_expert_offload": True, "moe_expert_cache_size": num_slots}
        if request.num_ranks > 1:
            shown["tensor_parallel_size"] = request.num_ranks
        if reason := self._impossible(setup):
            never = Speed(float("inf"), float("inf"))
            return Candidate(label, shown, setup, Ledger(()), 0, 0, "", 0, never, never, lacks, reason)
        ledger = predict_ledger(sizes, setup)
        left, where = self._left(ledger, setup, config.cache.memory_ratio)
        per_page = setup.page_size * sizes.kv_bytes_per_token(setup.dtype)
        kv_tokens = (setup.num_pages - 1 + (left // per_page if per_page else 0)) * setup.page_size
        if not setup.on_cuda and config.cache.num_pages is None:
            kv_tokens, shown = self._cpu_pages(setup, shown, per_page)
        prompt = min(request.context, PREFILL_TOKENS)
        local, worst = (
            predict_speed(sizes, setup, machine, request.context, prompt, text) for text in (True, False)
        )
        missing, left, kv_tokens = max(0, -left), max(0, left), max(0, kv_tokens)
        return Candidate(label, shown, setup, ledger, missing, left, where, kv_tokens, local, worst, lacks)

    def _cpu_pages(self, setup: Setup, shown: dict[str, Any], per_page: int) -> tuple[int, dict[str, Any]]:
        """(KV tokens of a CPU run, its options): pages are named only where the engine by itself would make too few."""
        by_itself = min(
            -(-max(CPU_KV_TOKENS, setup.max_seq_len) // setup.page_size) + 1,
            int(self.machine.host_bytes * CPU_KV_SHARE) // max(per_page, 1),
        )
        if by_itself >= setup.num_pages:
            return (by_itself - 1) * setup.page_size, shown
        return (setup.num_pages - 1) * setup.page_size, {**shown, "num_pages": setup.num_pages}

    def _left(self, ledger: Ledger, setup: Setup, memory_ratio: float) -> tuple[int, str]:
        """(bytes left where memory is shortest, negative if it does not fit; where that is)."""
        machine = self.machine
        if not setup.on_cuda:
            return int(machine.host_bytes * HOST_SHARE) - ledger.total, "host"
        device = int(machine.gpu_bytes * memory_ratio) - machine.gpu_used - ledger.on("device")
        host = machine.pinnable_bytes - ledger.on("host")
        return (host, "pinned host") if host < 0 <= device or host < device < 0 else (device, "device")

    def _impossible(self, setup: Setup) -> str | None:
        if self.numbers.stored_format and self.numbers.stored_format not in PRECISION:
            return f"checkpoints stored as {self.numbers.stored_format!r} are unknown"
        if self.sizes.expert is None:
            return None
        if reason := get_format(setup.weight_format, setup.dtype, setup.group_size).check(self.sizes.expert):
            return reason
        if (
            setup.on_cuda
            and setup.weight_format.startswith("fp8")
            and self.machine.capability < FP8_CAPABILITY
        ):
            major, minor = self.machine.capability
            return f"fp8 needs compute capability 8.9, this GPU has {major}.{minor}: use int8"
        return None

    def _label(self, setup: Setup) -> str:
        dtype = str(setup.dtype).removeprefix("torch.")
        if self.sizes.expert is None:
            return f"{dtype} on {'GPU' if setup.on_cuda else 'CPU'}"
        name = dtype if setup.weight_format == "none" else setup.weight_format
        if setup.num_slots is not None:
            return f"{name}, {setup.num_slots}/{self.sizes.num_experts} on GPU"
        return f"{name}, all on {'GPU' if setup.on_cuda else 'CPU'}"


def recommend(candidates: Sequence[Candidate]) -> Candidate | None:
    """The most precise usable format, unless a less precise one is WORTH times faster; of one format the fastest set-up."""
    best = None
    for weight_format in PRECISION:
        usable = [c for c in candidates if c.usable and c.setup.weight_format == weight_format]
        if not usable:
            continue
        fastest = min(usable, key=lambda c: c.local.decode_ms)
        if best is None or fastest.local.decode_ms * WORTH <= best.local.decode_ms:
            best = fastest
    return best


def _rank(candidate: Candidate, best: Candidate | None) -> tuple[int, float]:
    """Recommended, then what runs, then what will run, then what is too large by how much, then what can't be."""
    if candidate is best:
        return 0, 0.0
    if candidate.impossible:
        return 4, 0.0
    if not candidate.fits:
        return 3, candidate.missing
    return (1 if candidate.usable else 2), candidate.local.decode_ms


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
    ratio = candidate.local.decode_ms / best.local.decode_ms
    order = PRECISION.index(candidate.setup.weight_format) - PRECISION.index(best.setup.weight_format)
    if order > 0 and ratio < 1.05:
        gain = 100 * (1 / ratio - 1)
        return f"less precise, and only {gain:.0f} % faster" if gain >= 1 else "less precise, and no faster"
    return f"{ratio:.1f} x slower" if ratio >= 1.0 else f"{1 / ratio:.1f} x faster"


def closest(plan: Plan) -> str:
    """What the set-up that needs least still lacks."""
    if plan.numbers.served:
        return "It can't run this model at all; the set-ups say what the model takes"
    runnable = [c for c in plan.candidates if not c.impossible and not c.lacks]
    if not runnable:
        return f"The first would be {plan.candidates[0].label}: {plan.candidates[0].verdict}"
    least = min(runnable, key=lambda c: c.missing)
    return f"The smallest, {least.label}, lacks {gib(least.missing)} of {least.where} memory"
