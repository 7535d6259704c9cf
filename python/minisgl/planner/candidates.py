"""Makes the candidates of a plan: expert format x where experts live x slots of a cache x size of a step.

Each is turned into a real configuration by `resolve.resolve` and into bytes by `engine.memory`, so that a recommended command
line is one the engine accepts and the bytes are those it will allocate.

    resident    every expert on the device
    device      all experts in pinned host memory, a cache of some on the device, which plans it itself
    staged      the same, planned by the host, where not all of them can be pinned
    CPU         everything in host memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minisgl.config import EngineConfig, ParallelConfig
from minisgl.engine.memory import (
    CPU_KV_SHARE,
    CPU_KV_TOKENS,
    Ledger,
    Setup,
    expert_cache_bytes,
    predict_ledger,
    setup_of,
)
from minisgl.layers.fp8 import FP8_CAPABILITY
from minisgl.models.sizes import ModelSizes, shard_sizes
from minisgl.moe.formats import get_format
from minisgl.planner.features import lacking
from minisgl.planner.machine import Machine
from minisgl.planner.numbers import ModelNumbers
from minisgl.planner.plan import (
    OFFERED,
    PRECISION,
    PREFILL_TOKENS,
    Candidate,
    Plan,
    Request,
    ranked,
    recommend,
)
from minisgl.planner.predict import Speed, predict_speed
from minisgl.resolve import Facts, resolve

STEPS = ((8192, 256), (8192, 32), (4096, 32), (2048, 16), (512, 8))
"""(--max-prefill-length, --max-running-requests) to try: smaller steps leave more memory to weights and KV pages."""
CACHE_OPTIONS = ("moe_expert_offload", "moe_expert_cache_size", "moe_offload_mode", "moe_prefetch")
HOST_SHARE = 0.9  # of available host memory that a plan may take
NEVER = Speed(float("inf"), float("inf"))


def make_plan(numbers: ModelNumbers, machine: Machine, request: Request) -> Plan:
    """All set-ups of the model on the machine, ranked. Raises ValueError for options that can't work."""
    ParallelConfig(request.num_ranks, int(request.given.get("expert_parallel_size", 1))).validate()
    sizes = shard_sizes(numbers.sizes, request.num_ranks, request.expert_parallel)
    request = replace(request, context=min(request.context, numbers.sizes.context_length))
    ranks = request.num_ranks
    rank_machine = replace(
        machine, host_bytes=machine.host_bytes // ranks, pinnable_bytes=machine.pinnable_bytes // ranks
    )
    build = _Builder(numbers, sizes, rank_machine, request)
    candidates = [c for weight_format in build.formats() for c in build.candidates(weight_format)]
    if not candidates:
        raise ValueError(
            "nothing to plan for: this machine has no GPU, and the CPU was not measured or is ruled out"
        )
    best = recommend(candidates)
    return Plan(
        request,
        numbers,
        sizes,
        rank_machine,
        in_order := ranked(candidates, best),
        in_order[0] if best else None,
    )


class _Builder:
    """Makes the candidates of one model, machine and request."""

    def __init__(self, numbers: ModelNumbers, sizes: ModelSizes, machine: Machine, request: Request) -> None:
        self.asked = request.given
        size = str(request.given.get("moe_expert_cache_size", "auto"))
        self.given_slots = int(size) if size.isdecimal() else None
        offloads = request.given.get("moe_expert_offload") or request.given.get("moe_prefetch")
        self.only_offloaded = bool(offloads) or self.given_slots is not None
        self.only_resident = sizes.expert is None or (self.given_slots or 0) >= sizes.num_experts
        given = dict(request.given)
        if self.only_resident:  # the engine drops a cache that holds everything
            self.only_offloaded = False
            given = {name: value for name, value in given.items() if name not in CACHE_OPTIONS}
        elif self.only_offloaded:  # a number of slots means it, and so does a way to fill them
            given["moe_expert_offload"] = True
        EngineConfig.from_kwargs(**given, model=request.model)
        request = replace(request, given=given)
        self.numbers, self.sizes, self.machine, self.request = numbers, sizes, machine, request
        self.features = {"tensor-parallel"} if request.num_ranks > 1 else set()
        if request.expert_parallel:
            self.features.add("expert-parallel")
        if numbers.stored_format:
            self.features.add("quantized-checkpoint")

    def formats(self) -> Sequence[str]:
        """Expert formats to try: the checkpoint's own and less precise ones."""
        stored, given = self.numbers.stored_format, self.request.given.get("moe_expert_quantization", "auto")
        if self.sizes.expert is None:
            return ("none",)
        if given != "auto":
            return (given,)
        if stored is None:
            return OFFERED
        if stored not in PRECISION:
            return (stored,)
        coarser = PRECISION[PRECISION.index(stored) + 1 :]
        return (stored, *(name for name in OFFERED if name in coarser))

    def candidates(self, weight_format: str) -> list[Candidate]:
        """Resident on the device, with caches of several sizes, and on the CPU."""
        by_itself = (None, "none") if self.numbers.stored_format is None else (self.numbers.stored_format,)
        options = {"moe_expert_quantization": weight_format} if weight_format not in by_itself else {}
        device, out = self.request.given.get("device", "auto"), []
        if self.machine.gpu and device != "cpu":
            resident = self._best_step(options, None)
            if resident.impossible or not self.only_offloaded:
                out.append(resident)
            if not self.only_resident and not resident.impossible:
                out += self._caches(options, resident.setup)
        if self.machine.host_read_gbps and device != "cuda" and self.request.num_ranks == 1:
            out.append(self._on_cpu(options))
        return out

    def _on_cpu(self, options: Mapping[str, Any]) -> Candidate:
        """Everything in host memory. A cache of experts there saves nothing: only who asks for one gets it."""
        num_slots = None
        if self.sizes.expert and self.only_offloaded:
            num_slots = self.given_slots or max(2 * self.sizes.top_k, self.sizes.num_experts // 4)
        return self._best_step({**options, **({"device": "cpu"} if self.machine.gpu else {})}, num_slots)

    def _caches(self, options: Mapping[str, Any], setup: Setup) -> list[Candidate]:
        """Expert caches: a quarter, a half and three quarters of the experts, and the most that fits if not all do."""
        num_experts, top_k = self.sizes.num_experts, self.sizes.top_k
        mode = self._cache_mode(setup)
        options = {**options, **mode}
        if self.given_slots is not None:
            return [self._best_step(options, self.given_slots)]
        least = min(top_k, num_experts - 1)
        fullest = self._fullest(options, least)
        most = fullest.setup.num_slots if fullest is not None else num_experts
        assert most is not None
        wanted = {least, *(max(least, num_experts * share // 4) for share in (1, 2, 3))}
        if fullest is not None:
            wanted = {slots for slots in wanted if slots < most}
        caches = [self._best_step(options, slots) for slots in sorted(wanted, reverse=True)]
        return caches if fullest is None else [fullest, *caches]

    def _cache_mode(self, setup: Setup) -> dict[str, Any]:
        """Who plans the cache: the host where the experts can't all be pinned."""
        if self.request.given.get("moe_offload_mode", "auto") != "auto":
            return {}
        everything = expert_cache_bytes(self.sizes, setup, self.sizes.num_experts)
        return {"moe_offload_mode": "staged" if everything > self.machine.pinnable_bytes else "device"}

    def _fullest(self, options: Mapping[str, Any], floor: int) -> Candidate | None:
        """Of the largest caches that fit beside steps of every size, the one that answers soonest; None if none fits."""
        found = [self._most_slots({**options, **step}, floor) for step in self._steps()]
        fitting = [c for c in found if c is not None]
        return min(fitting, key=lambda c: c.local.answer_s, default=None)

    def _most_slots(self, options: Mapping[str, Any], floor: int) -> Candidate | None:
        """The most slots, from `floor` on, that leave room for all else; fewer than all experts."""
        if not self._candidate(options, floor).fits:
            return None
        low, high = floor, self.sizes.num_experts  # low fits; high is not asked
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._candidate(options, middle).fits else (low, middle)
        return self._candidate(options, low)

    def _steps(self) -> list[dict[str, Any]]:
        """Options of the step sizes to try, the largest, which needs none, first."""
        given, steps = self.request.given, []
        for prefill, running in STEPS:
            step: dict[str, Any] = {}
            if prefill != STEPS[0][0] and "max_prefill_length" not in given:
                step["max_prefill_length"] = prefill
            if running != STEPS[0][1] and "max_running_requests" not in given:
                step["max_running_requests"] = max(running, self.request.concurrency)
            steps.append(step)
        return steps

    def _best_step(self, options: Mapping[str, Any], num_slots: int | None) -> Candidate:
        """The candidate with the largest step that fits; with the smallest one if none does."""
        candidate = None
        for step in self._steps():
            candidate = self._candidate({**options, **step}, num_slots)
            if candidate.fits or candidate.impossible:
                break
        assert candidate is not None
        return candidate

    def _resolve(self, options: Mapping[str, Any]) -> tuple[EngineConfig, Setup]:
        """The configuration that would run, and what it means for memory with room for the context that was asked."""
        request, capability, stored = self.request, self.machine.capability, self.numbers.stored_format
        facts = Facts(
            has_cuda=self.machine.gpu is not None,
            has_bf16=capability >= (8, 0),
            checkpoint_dtype=str(self.numbers.dtype).removeprefix("torch."),
            context_length=self.numbers.sizes.context_length,
            expert_format=stored if stored in PRECISION else "none",
            expert_group_size=self.numbers.stored_group,
            has_fp8=capability >= FP8_CAPABILITY,
            device_bytes=self.machine.gpu_bytes,
            vocab_size=self.numbers.sizes.vocab_size,
        )
        given = {**request.given, **options, "model": request.model}
        if given.get("moe_offload_mode") == "staged":  # as the engine does where it can't plan on the device
            given.pop("moe_prefetch", None)
        config, _ = resolve(EngineConfig.from_kwargs(**given), facts)
        cache = config.cache
        pages = request.concurrency * -(-request.context // cache.page_size) + 1
        if cache.max_total_tokens is not None and "max_total_tokens" in request.given:
            pages = -(-cache.max_total_tokens // cache.page_size) + 1
        return config, setup_of(config, pages)

    def _lacks(self, num_slots: int | None) -> tuple[str, ...]:
        """Why this version can't run it, whatever memory there is."""
        features = self.features | ({"expert-offload"} if num_slots is not None else set())
        unserved = ["this architecture is not served"] if self.numbers.served else []
        return (*unserved, *lacking(frozenset(features)))

    def _candidate(self, options: Mapping[str, Any], num_slots: int | None) -> Candidate:
        request, sizes, machine = self.request, self.sizes, self.machine
        shown = dict(options)
        if num_slots is not None:
            shown |= {"moe_expert_offload": True, "moe_expert_cache_size": num_slots}
        config, setup = self._resolve(shown)
        shown = {name: value for name, value in shown.items() if name not in self.asked}
        label, lacks = self._label(setup), self._lacks(num_slots)
        if reason := self._impossible(setup):
            return Candidate(label, shown, setup, Ledger(()), 0, 0, "", 0, NEVER, NEVER, lacks, reason)
        ledger = predict_ledger(sizes, setup)
        left, where = self._left(ledger, setup, config.cache.memory_ratio)
        per_page = setup.page_size * sizes.kv_bytes_per_token(setup.dtype)
        grows = config.cache.num_pages is None and "max_total_tokens" not in request.given
        kv_tokens = (setup.num_pages - 1 + (left // per_page if per_page and grows else 0)) * setup.page_size
        if not setup.on_cuda and grows:
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
        host = int(machine.host_bytes * HOST_SHARE) - ledger.on("host")
        if not setup.on_cuda:
            return host, "host"
        if setup.offloaded and not setup.staged:  # every expert must be pinned
            host = min(host, machine.pinnable_bytes - ledger.on("host"))
        device = int(machine.gpu_bytes * memory_ratio) - machine.gpu_used - ledger.on("device")
        return (host, "host") if host < min(device, 0) else (device, "device")

    def _impossible(self, setup: Setup) -> str | None:
        stored = self.numbers.stored_format
        if stored and stored not in PRECISION:
            return f"checkpoints stored as {stored!r} are unknown"
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
        where = "GPU" if setup.on_cuda else "CPU"
        if setup.num_slots is None:
            return f"{name}, all on {where}"
        staged = ", staged" if setup.staged and setup.on_cuda else ""
        return f"{name}, {setup.num_slots}/{self.sizes.num_experts} on {where}{staged}"
