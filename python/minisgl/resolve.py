"""From what the user asked for to what will run: every "auto" decided once, with the reason, and nothing changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minisgl.config import CacheConfig, EngineConfig, KernelConfig, ModelConfig, ParallelConfig

OFFLOAD_KV_TOKENS = (
    32_768  # KV tokens that a cache of experts sized by what memory leaves must leave room for
)
GRAPH_SHARE = 0.01  # of the device's memory that the scores of the largest captured batch may take


@dataclass(frozen=True)
class Decision:
    """One thing `resolve` decided: the flag, the value that will be used, and why."""

    flag: str
    value: str
    reason: str


@dataclass(frozen=True)
class Facts:
    """What `resolve` needs to know of the machine and the model.

    has_cuda, has_bf16: whether a CUDA device is there and computes in bfloat16. checkpoint_dtype: "bfloat16" or the like.
    context_length: positions the model serves. expert_format, expert_group_size: what keeps the checkpoint's experts as they
    are, as values of --moe-expert-quantization and --moe-quantization-group-size; "none" for plain weights. dense_group:
    columns that share a scale in a checkpoint whose attention is fp8 in blocks, else 0. has_fp8: whether the CUDA device
    computes in fp8. attention: backend for 16 bits on this GPU, and why. device_bytes: memory of the CUDA device, 0 if
    unknown. vocab_size: tokens that a step scores. dispatch: between ranks that share experts, and why.
    """

    has_cuda: bool
    has_bf16: bool
    checkpoint_dtype: str
    context_length: int
    expert_format: str = "none"
    expert_group_size: int = 128
    dense_group: int = 0
    has_fp8: bool = False
    attention: tuple[str, str] = ("triton", "the fastest on cuda without extras")
    device_bytes: int = 0
    vocab_size: int = 0
    dispatch: tuple[str, str] = ("reduce", "no record of this GPU says that another is faster")


def resolve(config: EngineConfig, facts: Facts) -> tuple[EngineConfig, list[Decision]]:
    """Replace every "auto" and missing value that can be known before loading; pure.

    Raises ValueError with the remedy where a request cannot be met on this machine. Explicit values are never overruled.
    """
    config.validate()
    made: list[Decision] = []
    model = _resolve_model(config.model, facts, made)
    kernel = _resolve_kernel(config.kernel, model, facts, made)
    parallel = _resolve_parallel(config.parallel, facts, made)
    config = replace(config, parallel=parallel)
    kernel = replace(kernel, cuda_graph_max_bs=_graph_batch(config, model.device, facts, made))
    cache = _resolve_cache(config, model, made)
    scheduler = config.scheduler
    if (
        not config.offload.moe_expert_offload
    ):  # else the cache of experts and the step share what memory leaves
        scheduler = replace(scheduler, max_prefill_length=scheduler.step_tokens)
    return replace(config, model=model, kernel=kernel, cache=cache, scheduler=scheduler), made


def _decide(made: list[Decision], flag: str, value: str, reason: str) -> str:
    made.append(Decision(flag, value, reason))
    return value


def _resolve_model(model: ModelConfig, facts: Facts, made: list[Decision]) -> ModelConfig:
    """Device, dtype and context length."""
    device = model.device
    if device == "auto":
        reason = "a CUDA device is available" if facts.has_cuda else "no CUDA device is available"
        device = _decide(made, "--device", "cuda" if facts.has_cuda else "cpu", reason)
    elif device == "cuda" and not facts.has_cuda:
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA device; use --device cpu, or check nvidia-smi and the driver"
        )
    dtype = model.dtype
    if dtype == "auto":
        dtype = _decide(made, "--dtype", *_choose_dtype(device, facts))
    elif dtype == "bfloat16" and device == "cuda" and not facts.has_bf16:
        raise ValueError("--dtype bfloat16: this GPU does not compute in bfloat16; use --dtype float16")
    length = model.max_seq_len_override
    if length is None:
        length = facts.context_length
        _decide(made, "--max-seq-len-override", str(length), "the model's own maximum")
    group = _dense_group(model, facts, made) if model.quantize_dense == "fp8" else 0
    if model.quantize_dense == "fp8" and device == "cuda" and not facts.has_fp8:
        reason = (
            "this GPU does not compute in fp8: every step dequantizes them, which saves memory and costs time"
        )
        _decide(made, "--quantize-dense", "fp8", reason)
    return replace(
        model,
        device=device,
        dtype=dtype,
        max_seq_len_override=length,
        quantize_dense_group_size=group,
    )


def _dense_group(model: ModelConfig, facts: Facts, made: list[Decision]) -> int:
    """Columns that share a scale in fp8 dense weights."""
    asked, stored = model.quantize_dense_group_size, facts.dense_group
    if asked or not stored or model.dummy_weight:
        return asked
    _decide(made, "--quantize-dense-group-size", str(stored), "the checkpoint's own blocks, kept as they are")
    return stored


def _choose_dtype(device: str, facts: Facts) -> tuple[str, str]:
    """What --dtype auto means there, and why."""
    if device == "cpu":
        return "float32", "a CPU computes it fastest and exactly"
    if facts.checkpoint_dtype != "float16" and not facts.has_bf16:
        return "float16", "this GPU has no bfloat16"
    if facts.checkpoint_dtype == "float32":
        return "bfloat16", "the checkpoint is float32, which halves the speed; --dtype float32 keeps it"
    return facts.checkpoint_dtype, "the checkpoint's own"


def _resolve_kernel(
    kernel: KernelConfig, model: ModelConfig, facts: Facts, made: list[Decision]
) -> KernelConfig:
    """Backends, and the format of the experts."""
    device, dtype = model.device, model.dtype
    on_cuda = device == "cuda"
    attention, moe = kernel.attention_backend, kernel.moe_backend
    if attention == "auto":
        name, reason = facts.attention if on_cuda else ("sdpa", "the fastest on cpu without extras")
        if on_cuda and dtype == "float32":
            name, reason = "triton", "the fastest on cuda in float32"
        attention = _decide(made, "--attention-backend", name, reason)
    if moe == "auto":
        moe = _decide(made, "--moe-backend", "fused" if on_cuda else "torch", f"the fastest on {device}")
    experts, group_size = kernel.moe_expert_quantization, kernel.moe_quantization_group_size
    if experts == "auto":
        experts = facts.expert_format
        if experts != "none":
            _decide(made, "--moe-expert-quantization", experts, "the checkpoint's own")
    if experts == facts.expert_format and experts.startswith("int4"):
        group_size = facts.expert_group_size
    return replace(
        kernel,
        attention_backend=attention,
        moe_backend=moe,
        moe_expert_quantization=experts,
        moe_quantization_group_size=group_size,
    )


def _resolve_parallel(parallel: ParallelConfig, facts: Facts, made: list[Decision]) -> ParallelConfig:
    """How tokens get to the experts of other ranks."""
    if parallel.expert_parallel_size == 1 or parallel.moe_ep_dispatch != "auto":
        return parallel
    return replace(parallel, moe_ep_dispatch=_decide(made, "--moe-ep-dispatch", *facts.dispatch))


def _graph_batch(config: EngineConfig, device: str, facts: Facts, made: list[Decision]) -> int | None:
    """The largest batch that CUDA graphs are captured for: a power of two whose float32 scores take at most GRAPH_SHARE of the
    device's memory. 0 where no graph is possible, None without a device.
    """
    asked, most = config.kernel.cuda_graph_max_bs, config.scheduler.max_running_requests
    row_bytes = 4 * facts.vocab_size
    if asked is not None or device != "cuda" or not facts.device_bytes * row_bytes:
        return asked
    if config.parallel.moe_ep_dispatch == "dynamic":
        return 0
    memory = min(facts.device_bytes, config.cache.gpu_limit_bytes or facts.device_bytes)
    rows = max(1, int(memory * GRAPH_SHARE) // row_bytes)
    batch = min(most, 1 << (rows.bit_length() - 1))
    reason = (
        "as --max-running-requests"
        if batch == most
        else f"scores of more take over {GRAPH_SHARE:.0%} of the memory"
    )
    _decide(made, "--cuda-graph-max-bs", str(batch), reason)
    return batch


def _resolve_cache(config: EngineConfig, model: ModelConfig, made: list[Decision]) -> CacheConfig:
    """How many tokens the KV cache holds, where the experts' cache takes what is left instead."""
    cache, offload = config.cache, config.offload
    if cache.gpu_memory_limit is not None and model.device == "cpu":
        raise ValueError(
            f"--gpu-memory-limit={cache.gpu_memory_limit} is for a CUDA device, and this runs on the CPU: leave it out"
        )
    sized_by_rest = offload.moe_expert_offload and offload.num_slots is None and model.device == "cuda"
    if not sized_by_rest or cache.num_pages is not None or cache.max_total_tokens is not None:
        return cache
    assert model.max_seq_len_override is not None
    tokens = min(OFFLOAD_KV_TOKENS, model.max_seq_len_override)
    _decide(made, "--max-total-tokens", str(tokens), "the rest of the memory goes to experts")
    return replace(cache, max_total_tokens=tokens)
