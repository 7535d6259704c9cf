"""Configuration: one frozen tree of dataclasses, resolved once and never changed afterwards.

Command-line flags, the keyword arguments of `LLM` and the table in docs/flags.md are all generated from the fields below, so
they cannot disagree (flags.py). `resolve.py` turns what the user asked for into what will run.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from minisgl.eviction import POLICIES, EvictionConfig
from minisgl.flags import add_flags, flag, flag_names, iter_flags, parse_bytes

STEP_TOKENS = 8192  # --max-prefill-length where nothing speaks against it


@dataclass(frozen=True)
class ModelConfig:
    """Which weights, where from, in what type, on what device."""

    model: str = flag(
        "",
        "local folder, Hugging Face or ModelScope id, or a bundled name (demo, smollm2)",
        names=("--model", "--model-path"),
    )
    model_source: str = flag("huggingface", "hub that an id refers to", choices=("huggingface", "modelscope"))
    revision: str | None = flag(None, "branch, tag or commit of a hub model")
    offline: bool = flag(False, "use what is in the hub's cache, and never the network")
    dtype: str = flag(
        "auto",
        "type of weights and activations; auto follows the checkpoint (float32 on a CPU)",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = flag(
        "auto", "where to run; auto takes CUDA where it is available", choices=("auto", "cpu", "cuda")
    )
    max_seq_len_override: int | None = flag(
        None, "longest sequence in tokens, instead of the model's own maximum"
    )
    quantize_dense: str = flag(
        "none",
        "storage of attention projections and lm_head; an fp8 checkpoint keeps its own scales",
        choices=("none", "fp8"),
    )
    quantize_dense_group_size: int = flag(
        0, "input values that share a scale in --quantize-dense; 0: a whole row, or what the checkpoint has"
    )
    embedding_on_host: bool = flag(
        False, "keep the embedding in pinned host memory; kernels read the rows of a batch from there"
    )
    dummy_weight: bool = flag(False, "random weights: only config.json is read (for benchmarks)")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache and the prefix cache over it."""

    page_size: int = flag(16, "tokens a KV page holds; prefixes are shared in whole pages")
    num_pages: int | None = flag(
        None, "KV pages; default: what --memory-ratio leaves (CPU: one 8k-token cache)"
    )
    max_total_tokens: int | None = flag(
        None,
        "tokens whose keys and values must fit, instead of --num-pages; with --moe-expert-cache-size auto the "
        "rest of the memory goes to experts, and the default is 32768, or the model's maximum if smaller",
    )
    memory_ratio: float = flag(
        0.9, "share of the device's memory for weights, workspace and KV pages together"
    )
    gpu_memory_limit: str | None = flag(
        None,
        "behave as on a card of this size, e.g. 12GiB: to share a GPU, or to try what a smaller one would do",
    )
    cache_type: str = flag(
        "radix", "prefix cache", names=("--cache", "--cache-type"), choices=("radix", "naive")
    )

    @property
    def gpu_limit_bytes(self) -> int | None:
        """--gpu-memory-limit as a number; ValueError if it is none."""
        limit = self.gpu_memory_limit
        return None if limit is None else parse_bytes(limit, "--gpu-memory-limit")


@dataclass(frozen=True)
class PrefixEvictionConfig:
    """Which cached prefixes to give up first when pages run out; see docs/eviction.md."""

    cache_eviction_policy: str = flag(
        "lru", f"{', '.join(POLICIES)}, or package.module:Class of your own (see docs/eviction.md)"
    )
    eviction_k: int = flag(2, "lru-k: which latest use counts")
    eviction_half_life: float = flag(
        600.0, "seconds after which a use counts half (frequency-decay, cost-aware)"
    )
    adaptive_experts: tuple[str, ...] = flag(
        ("lru", "lfu", "cost-aware"), "policies that adaptive chooses among"
    )
    adaptive_learning_rate: float = flag(0.05, "how fast adaptive moves its weights")
    adaptive_seed: int = flag(0, "seed of adaptive's draws")
    eviction_ghost_capacity: int = flag(65536, "evicted pages that adaptive remembers")

    def build(self) -> EvictionConfig:
        """The same numbers as eviction.py names them; ValueError for what cannot work."""
        return EvictionConfig(
            policy=self.cache_eviction_policy,
            k=self.eviction_k,
            half_life=self.eviction_half_life,
            experts=self.adaptive_experts,
            learning_rate=self.adaptive_learning_rate,
            seed=self.adaptive_seed,
            ghost_capacity=self.eviction_ghost_capacity,
        ).resolve()


@dataclass(frozen=True)
class SchedulerConfig:
    """What may run together in one step."""

    max_running_requests: int = flag(256, "requests that hold KV pages at the same time")
    max_prefill_length: int | None = flag(
        None,
        f"tokens of one step; longer prompts are computed in chunks. auto: {STEP_TOKENS}, with experts in host memory less "
        "where memory forbids it",
    )
    disable_overlap: bool = flag(False, "wait for each step's tokens before planning the next one")

    @property
    def step_tokens(self) -> int:
        """--max-prefill-length, and what it means while nobody has decided."""
        return STEP_TOKENS if self.max_prefill_length is None else self.max_prefill_length


@dataclass(frozen=True)
class KernelConfig:
    """Which implementation computes what."""

    attention_backend: str = flag(
        "auto",
        "attention over the paged cache",
        names=("--attention-backend", "--attn"),
        choices=("auto", "sdpa", "triton", "flashinfer"),
    )
    cuda_graph_max_bs: int | None = flag(
        None,
        "largest decode batch that runs as a CUDA graph; 0 for none, default: by the device's memory, at most"
        " --max-running-requests",
    )
    moe_backend: str = flag(
        "auto",
        "expert computation; auto is fused on CUDA, torch on a CPU",
        choices=("auto", "fused", "torch"),
    )
    moe_expert_quantization: str = flag(
        "auto",
        "storage of expert weights; attention and embeddings stay as they are. auto: as the checkpoint has them",
        choices=("auto", "none", "int8", "fp8", "int4", "int4_asym", "fp8_block", "mxfp4"),
    )
    moe_quantization_group_size: int = flag(128, "input values that share a scale in int4")
    moe_small_m_threshold: str = flag(
        "auto", "use the direct (decode) kernels up to this many tokens; 0 never, auto lets the record decide"
    )
    moe_autotune: bool = flag(False, "measure kernel tiles for shapes that have no record")
    disable_moe_workspace_cache: bool = flag(
        False, "allocate MoE scratch space anew in every call (for comparison)"
    )


@dataclass(frozen=True)
class OffloadConfig:
    """Experts in host memory, and a cache of them on the device; see docs/offload.md."""

    moe_expert_offload: bool = flag(
        False, "keep all experts in host memory and only the recently used ones of each layer on the device"
    )
    moe_offload_mode: str = flag(
        "auto",
        "who plans the cache: the device itself (device; all experts in pinned host memory), or the host (staged); auto is "
        "device where it can be",
        choices=("auto", "device", "staged"),
    )
    moe_expert_cache_size: str = flag(
        "auto", "experts a layer keeps on the device; auto: as many as memory leaves beside everything else"
    )
    moe_expert_offload_wave_size: int = flag(
        8, "missing experts that are computed together; later ones travel meanwhile (staged mode)"
    )
    moe_prefetch: bool = flag(
        False,
        "guess the next layer's experts from this layer's input, and fetch those it lacks while the link is idle (device "
        "mode); a layer where that does not pay stops by itself",
    )
    moe_trace: str | None = flag(
        None, "write which experts every token used to this file (npz) at the end; without CUDA graphs"
    )

    @property
    def num_slots(self) -> int | None:
        """Slots a layer, None for auto."""
        size = str(self.moe_expert_cache_size)
        return None if size == "auto" else int(size)

    def validate(self) -> None:
        """See `EngineConfig.validate`."""
        size = str(self.moe_expert_cache_size)
        if size != "auto" and not (size.isdecimal() and int(size) >= 1):
            raise ValueError(
                f"--moe-expert-cache-size={size}: use auto or at least 1 slot a layer; to keep every expert on the "
                "device, leave out --moe-expert-offload"
            )
        if size != "auto" and not self.moe_expert_offload:
            raise ValueError(f"--moe-expert-cache-size={size} needs --moe-expert-offload: add it")
        if self.moe_prefetch and not self.moe_expert_offload:
            raise ValueError("--moe-prefetch fetches experts from host memory: add --moe-expert-offload")
        if self.moe_prefetch and self.moe_offload_mode == "staged":
            raise ValueError(
                "--moe-prefetch: the host, which plans in --moe-offload-mode staged, can't stop a copy when it is in the way; "
                "use device or auto, or leave it out"
            )
        if self.moe_expert_offload_wave_size < 1:
            raise ValueError(
                f"--moe-expert-offload-wave-size={self.moe_expert_offload_wave_size} must be at least 1"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks (GPUs, or CPU processes) work on one model, and what each holds; see docs/parallel.md."""

    tensor_parallel_size: int = flag(
        1, "ranks that share every layer", names=("--tp", "--tensor-parallel-size")
    )
    expert_parallel_size: int = flag(
        1,
        "ranks that experts are spread over: 1 (each rank has a part of every expert) or --tp (whole experts)",
    )
    moe_expert_placement: str = flag(
        "contiguous",
        "which experts a rank owns: neighbours, or every n-th",
        choices=("contiguous", "round-robin"),
    )
    moe_replicated_experts: tuple[int, ...] = flag(
        (), "experts that every rank holds, for example 3,17; `minisgl plan-experts` proposes some"
    )
    moe_ep_dispatch: str = flag(
        "auto",
        "how tokens meet their experts: all ranks see all tokens (reduce), or tokens travel in exact (dynamic) or fixed "
        "(static) numbers; auto is reduce",
        choices=("auto", "reduce", "dynamic", "static"),
    )
    disable_moe_communication_overlap: bool = flag(
        False, "dynamic, static: compute own and received tokens as one batch, once all have arrived"
    )
    distributed_backend: str = flag(
        "auto",
        "what carries tensors between ranks; auto is nccl on CUDA, gloo on CPUs",
        choices=("auto", "nccl", "gloo"),
    )
    collective_timeout: float | None = flag(
        None,
        "seconds one rank may keep the others waiting inside a step; default 10 on gloo and 60 on nccl, where ranks also "
        "wait for each other's kernels to compile",
    )

    def validate(self) -> None:
        """See `EngineConfig.validate`."""
        tp, ep, replicated = self.tensor_parallel_size, self.expert_parallel_size, self.moe_replicated_experts
        if tp < 1:
            raise ValueError(f"--tp={tp} must be at least 1")
        if ep not in (1, tp):
            raise ValueError(f"--expert-parallel-size={ep} must be 1 or the number of ranks, --tp={tp}")
        for name, given in (
            ("--moe-expert-placement", self.moe_expert_placement != "contiguous"),
            ("--moe-replicated-experts", bool(replicated)),
            ("--moe-ep-dispatch", self.moe_ep_dispatch != "auto"),
        ):
            if given and ep == 1:
                raise ValueError(f"{name} needs --expert-parallel-size (and --tp) of at least 2")
        if self.disable_moe_communication_overlap and self.moe_ep_dispatch not in ("dynamic", "static"):
            raise ValueError(
                "--disable-moe-communication-overlap: tokens travel only with --moe-ep-dispatch dynamic or static; add one, or "
                "leave it out"
            )
        for position, expert in enumerate(replicated):
            if expert < 0 or expert in replicated[:position]:
                what = "names a negative expert" if expert < 0 else f"names expert {expert} twice"
                raise ValueError(f"--moe-replicated-experts={','.join(map(str, replicated))} {what}")
        if self.collective_timeout is not None and self.collective_timeout <= 0:
            raise ValueError(f"--collective-timeout={self.collective_timeout} must be more than 0 seconds")


@dataclass(frozen=True)
class EngineConfig:
    """Everything engine and scheduler need to know. Build it with `from_kwargs` or from the command line."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    eviction: PrefixEvictionConfig = field(default_factory=PrefixEvictionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Flat keyword arguments, named as the fields, sorted into their groups. Unknown names raise ValueError."""
        groups: dict[str, Any] = {}
        for group in dataclasses.fields(cls):
            kind = group.default_factory
            assert isinstance(kind, type)
            names = {f.name for f in dataclasses.fields(kind)} & kwargs.keys()
            groups[group.name] = kind(**{name: kwargs.pop(name) for name in names})
        if kwargs:
            known = sorted(f.name for _, f in iter_flags(cls))
            raise ValueError(f"unknown option {sorted(kwargs)[0]!r}; known are {', '.join(known)}")
        config = cls(**groups)
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError, naming the flag and the remedy, for anything that can never work."""
        cache, scheduler = self.cache, self.scheduler
        for group, item in iter_flags(type(self)):
            choices = item.metadata.get("choices")
            value = getattr(getattr(self, group), item.name)
            if choices and value not in choices:
                raise ValueError(
                    f"{flag_names(item)[0]}={value!r} is unknown: use one of {', '.join(choices)}"
                )
        for name, value in (
            ("--page-size", cache.page_size),
            ("--max-running-requests", scheduler.max_running_requests),
            ("--max-prefill-length", scheduler.step_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if cache.num_pages is not None and cache.num_pages < 2:
            raise ValueError(f"--num-pages={cache.num_pages} must be at least 2: page 0 is kept for padding")
        if cache.max_total_tokens is not None and cache.max_total_tokens < 1:
            raise ValueError(f"--max-total-tokens={cache.max_total_tokens} must be at least 1")
        if cache.num_pages is not None and cache.max_total_tokens is not None:
            raise ValueError(
                "--num-pages and --max-total-tokens both say how large the KV cache is: give one"
            )
        if not 0.0 < cache.memory_ratio <= 1.0:
            raise ValueError(f"--memory-ratio={cache.memory_ratio} must lie in (0, 1]")
        _ = cache.gpu_limit_bytes  # says what is wrong with it
        graph_limit = self.kernel.cuda_graph_max_bs
        if graph_limit is not None and graph_limit < 0:
            raise ValueError(f"--cuda-graph-max-bs={graph_limit} must be 0 (no graphs) or more")
        override = self.model.max_seq_len_override
        if override is not None and override < 2:
            raise ValueError(f"--max-seq-len-override={override} must be at least 2")
        self.parallel.validate()
        if self.offload.moe_prefetch and self.parallel.expert_parallel_size > 1:
            raise ValueError(
                "--moe-prefetch guesses for tokens that the ranks haven't exchanged yet: leave out --expert-parallel-size "
                "(--tp alone works), or leave out --moe-prefetch"
            )
        if self.parallel.moe_ep_dispatch == "dynamic" and graph_limit:
            raise ValueError(
                f"--moe-ep-dispatch dynamic reads counts on the host, which no CUDA graph can hold: leave out "
                f"--cuda-graph-max-bs {graph_limit}, or use reduce or static"
            )
        group_size = self.model.quantize_dense_group_size
        if group_size < 0 or group_size % 16:
            raise ValueError(f"--quantize-dense-group-size={group_size} must be 0 or a multiple of 16")
        threshold = self.kernel.moe_small_m_threshold
        if threshold != "auto" and not threshold.isdecimal():
            raise ValueError(f"--moe-small-m-threshold={threshold!r} must be auto or a whole number")
        self.offload.validate()
        self.eviction.build()


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a field of `EngineConfig`, in its groups."""
    for group in dataclasses.fields(EngineConfig):
        fields = [item for name, item in iter_flags(EngineConfig) if name == group.name]
        add_flags(parser, fields, group.name)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine flags that were given, as keyword arguments of `EngineConfig.from_kwargs` and `LLM`."""
    names = {item.name for _, item in iter_flags(EngineConfig)}
    return {name: value for name, value in vars(args).items() if name in names and value is not None}
