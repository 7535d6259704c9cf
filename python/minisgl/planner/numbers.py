"""config.json of any family as sizes: exact where the engine serves the family, else from the fields whose meaning is known.

The engine refuses what it can't run (`ModelSpec`); a plan should still say how large such a model is. So this reading is
tolerant: it knows the keys by which families name the same thing, and lists what it could not account for instead of failing.
Only what no plan can do without (layers, dims, heads, vocabulary) must be there.

Layers of multi-token prediction are left out: decoding doesn't use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minisgl.models.checkpoints import ExpertChoice, find_encodings, stored_experts
from minisgl.models.checkpoints.converted import METHOD
from minisgl.models.sizes import ModelSizes, model_sizes
from minisgl.models.spec import FAMILIES, ModelSpec
from minisgl.moe.base import ExpertShape

Config = Mapping[str, Any]

EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "experts_per_token",
)
EXPERT_WIDTH_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size")
SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_UNREAD = {
    "index_topk": "the indexer of sparse attention",
    "num_kv_shared_layers": "layers that share keys and values",
    "vision_config": "the vision tower",
    "audio_config": "the audio tower",
    "mamba_d_state": "Mamba layers",
}


@dataclass(frozen=True)
class ModelNumbers:
    """What a plan knows of a model. sizes: see `ModelSizes`. architecture: as config.json names it. dtype: the checkpoint's.

    served: None if the engine runs it, else the reason in words. unknown: parts that the sizes do not count.
    stored_format: expert format of a quantized checkpoint ("fp8_block", "mxfp4", "int4", or its method if that is none of
    ours), None for plain weights; stored_group: the group size of int4.
    """

    sizes: ModelSizes
    architecture: str
    dtype: torch.dtype
    served: str | None = None
    unknown: tuple[str, ...] = ()
    stored_format: str | None = None
    stored_group: int = 128


def read_numbers(config: Config, folder: Path | None = None) -> ModelNumbers:
    """Sizes of the model that this config.json dictionary describes. ValueError for missing fields and impossible numbers.

    folder: where its checkpoint is, if it is there; how the experts are stored is then read as the engine reads it.
    """
    architecture = (config.get("architectures") or ["(unnamed)"])[0]
    for key in EXPERT_KEYS:
        if config.get(key) == 0:
            raise ValueError(f"config.json: {key} is 0; a model without experts leaves the key out")
    if architecture in FAMILIES:
        spec = ModelSpec.from_config(config)
        return _with_stored(ModelNumbers(model_sizes(spec), architecture, spec.dtype), config, folder)
    unknown = [what for key, what in _UNREAD.items() if config.get(key)]
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    numbers = ModelNumbers(
        _tolerant_sizes(config, unknown),
        architecture,
        _dtype(config),
        f"{architecture} is not served by this version",
        tuple(unknown),
    )
    return _with_stored(numbers, config, folder)


def _with_stored(numbers: ModelNumbers, config: Config, folder: Path | None) -> ModelNumbers:
    """The same, and how its experts are stored; a method that no encoding is for stands for itself."""
    if (shape := numbers.sizes.expert) is None:
        return numbers
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    method = quantization.get("quant_method")
    try:
        if folder is not None:
            choice = stored_experts(folder, shape)
        elif method == METHOD:
            choice = ExpertChoice(str(quantization.get("format")), int(quantization.get("group_size", 128)))
        else:
            encodings = find_encodings(quantization or None)
            choice = encodings[0].expert_choice(shape) if encodings else None
    except ValueError:
        if not method:
            raise
        return replace(numbers, stored_format=str(method))
    if choice is None or choice.name == "none":
        return numbers
    return replace(numbers, stored_format=choice.name, stored_group=choice.group_size)


def _tolerant_sizes(config: Config, unknown: list[str]) -> ModelSizes:
    num_layers, dim = _need(config, "num_hidden_layers"), _need(config, "hidden_size")
    num_heads, vocab = _need(config, "num_attention_heads"), _need(config, "vocab_size")
    num_kv_heads = _count(config, ("num_key_value_heads",), num_heads)
    head_dim = _count(config, ("head_dim", "v_head_dim"), max(dim // num_heads, 1))
    tied = bool(config.get("tie_word_embeddings", _is(config, "gemma")))
    linear = _linear_layers(config, num_layers)
    sparse = _sparse_layers(config, num_layers)
    expert, moe_parts, wide = _experts(config, dim, len(sparse))
    hidden_dim = _count(config, ("intermediate_size", "ffn_hidden_size"), 0)
    if len(sparse) < num_layers and not hidden_dim:
        raise ValueError("config.json lacks 'intermediate_size', which its dense layers need")
    attention = (num_layers - len(linear)) * _attention_params(config, dim, num_heads, num_kv_heads, head_dim)
    delta, state = _delta_layer(config, dim) if linear else (0, 0)
    mla = config.get("kv_lora_rank")
    entry = int(mla) + _count(config, ("qk_rope_head_dim",), 0) if mla else 2 * num_kv_heads * head_dim
    dense = 3 * dim * hidden_dim + 2 * bool(config.get("mlp_bias")) * hidden_dim
    return ModelSizes(
        num_layers=num_layers,
        model_dim=dim,
        hidden_dim=hidden_dim,
        vocab_size=vocab,
        context_length=_count(config, ("max_position_embeddings", "max_sequence_length"), 32_768),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tied=tied,
        params={
            "embedding": vocab * dim,
            "head": 0 if tied else vocab * dim,
            "attention": attention + len(linear) * delta,
            "norms": (2 * num_layers + 1) * dim,
            "dense MLPs": (num_layers - len(sparse)) * dense,
            **moe_parts,
        },
        kv_elements_L=tuple(0 if i in linear else entry for i in range(num_layers)),
        windows_L=_windows(config, num_layers, unknown),
        wide_params=wide,
        state_elements=len(linear) * state,
        expert=expert,
        num_experts=_count(config, EXPERT_KEYS, 0) if expert else 0,
        top_k=_count(config, TOP_K_KEYS, 0) if expert else 0,
        num_sparse=len(sparse),
    )


def _attention_params(config: Config, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Weights of one attention layer: grouped-query, or MLA where kv_lora_rank is given (DeepSeek-V2, arXiv 2405.04434)."""
    if rank := config.get("kv_lora_rank"):
        nope, rope = _need(config, "qk_nope_head_dim"), _need(config, "qk_rope_head_dim")
        value, q_rank = _need(config, "v_head_dim"), config.get("q_lora_rank")
        q_dim = num_heads * (nope + rope)
        query = q_rank * (dim + 1 + q_dim) if q_rank else dim * q_dim
        return (
            query + dim * (rank + rope) + rank + rank * num_heads * (nope + value) + num_heads * value * dim
        )
    q_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
    gated = (
        2 if _is(config, "qwen3_next") or config.get("attn_output_gate") else 1
    )  # q carries a gate of its own width
    params = dim * ((1 + gated) * q_dim + 2 * kv_dim)
    if config.get("attention_bias"):
        params += q_dim + 2 * kv_dim + dim * _is(config, "gpt_oss")
    if _is(config, "gpt_oss"):
        params += num_heads  # one sink a head
    if _is(config, "olmoe"):
        params += q_dim + kv_dim  # norms over whole q and k
    elif config.get("use_qk_norm") or _is(config, "qwen3"):
        params += 2 * head_dim
    return params


def _experts(config: Config, dim: int, num_sparse: int) -> tuple[ExpertShape | None, dict[str, int], int]:
    """(shape of a routed expert, weights of routers and shared experts, how many of them are correction biases)."""
    empty = {"router": 0, "shared experts": 0}
    if not num_sparse:
        return None, empty, 0
    num_experts, top_k = _count(config, EXPERT_KEYS), _count(config, TOP_K_KEYS)
    if top_k > num_experts:
        raise ValueError(f"config.json: can't choose {top_k} of {num_experts} experts")
    width = _count(config, (*EXPERT_WIDTH_KEYS, "intermediate_size"))
    bias = _is(config, "gpt_oss")
    sigmoid = (
        config.get("scoring_func") == "sigmoid"
        or _is(config, "glm4_moe")
        or bool(config.get("use_routing_bias"))
    )
    wide = num_sparse * num_experts * sigmoid
    shared = _count(config, ("shared_expert_intermediate_size", "shared_intermediate_size"), 0)
    gate = (
        dim if "shared_expert_intermediate_size" in config and shared else 0
    )  # Qwen2-MoE scales it by a gate
    shared = shared or _count(config, SHARED_KEYS, 0) * width
    router = num_sparse * num_experts * (dim + bias) + wide
    return (
        ExpertShape(dim, width, bias),
        {"router": router, "shared experts": num_sparse * (3 * dim * shared + gate)},
        wide,
    )


def _sparse_layers(config: Config, num_layers: int) -> frozenset[int]:
    """Which layers are MoE, by any of the ways in which families say it."""
    key = next((key for key in EXPERT_KEYS if config.get(key) is not None), None)
    if key is None:
        if any(config.get(name) for name in (*EXPERT_WIDTH_KEYS, *TOP_K_KEYS)):
            raise ValueError(f"config.json has expert sizes but no number of experts: add {EXPERT_KEYS[0]!r}")
        return frozenset()
    kinds, freq = config.get("mlp_layer_types"), config.get("moe_layer_freq", 1)
    if kinds:
        return frozenset(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sparse")
    if isinstance(freq, list):
        return frozenset(i for i, used in enumerate(freq[:num_layers]) if used)
    first = (
        config.get(
            "first_k_dense_replace", config.get("moe_layer_start_index", config.get("num_dense_layers"))
        )
        or 0
    )
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    return frozenset(
        i for i in range(first, num_layers) if i not in dense and i % freq == 0 and (i + 1) % step == 0
    )


def _windows(config: Config, num_layers: int, unknown: list[str]) -> tuple[int | None, ...]:
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    if kinds:
        padded = [*kinds, *["full_attention"] * num_layers][:num_layers]
        return tuple(window if kind == "sliding_attention" else None for kind in padded)
    unknown.append("which layers have the sliding window (all are taken as full)")
    return (None,) * num_layers


def _linear_layers(config: Config, num_layers: int) -> frozenset[int]:
    kinds, every = config.get("layer_types"), config.get("full_attention_interval")
    if kinds:
        return frozenset(i for i, kind in enumerate(kinds[:num_layers]) if kind == "linear_attention")
    if every and "linear_num_value_heads" in config:
        return frozenset(i for i in range(num_layers) if (i + 1) % every)
    return frozenset()


def _delta_layer(config: Config, dim: int) -> tuple[int, int]:
    """(weights, elements of a request's state) of one gated delta-net layer (Qwen3-Next; arXiv 2412.06464)."""
    k_heads, v_heads = _need(config, "linear_num_key_heads"), _need(config, "linear_num_value_heads")
    k_dim, v_dim = _need(config, "linear_key_head_dim"), _need(config, "linear_value_head_dim")
    kernel = _count(config, ("linear_conv_kernel_dim",), 4)
    keys, values = k_heads * k_dim, v_heads * v_dim
    projections = dim * (2 * keys + 2 * values + 2 * v_heads) + values * dim
    convolution = (2 * keys + values) * kernel
    return projections + convolution + 2 * v_heads + v_dim, v_heads * k_dim * v_dim + convolution


def _is(config: Config, stem: str) -> bool:
    return str(config.get("model_type", "")).startswith(stem)


def _dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)


def _need(config: Config, key: str) -> int:
    return _count(config, (key,))


def _count(config: Config, keys: tuple[str, ...], default: int | None = None) -> int:
    """The first of `keys` that config.json has; without a default one must be there. Numbers below 1 are refused."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        if default is None:
            raise ValueError(
                f"config.json lacks {' or '.join(repr(key) for key in keys)}, without which nothing can be planned"
            )
        return default
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default is None else 0):
        raise ValueError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value
