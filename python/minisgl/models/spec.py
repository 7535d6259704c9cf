"""A model as plain numbers, read once from config.json; everything else in the engine asks this and never
the file.

Reads the older keys (`rope_theta`, `rope_scaling`, `torch_dtype`, `num_experts`) and the newer
(`rope_parameters`, `dtype`, `num_local_experts`). What differs between families is a field here, so that
the decoder has no branches by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minisgl.layers.rotary import ROPE_KINDS, RopeSpec, yarn_attention_factor
from minisgl.models.family import Config, Family, MoESpec
from minisgl.models.gpt_oss import GPT_OSS
from minisgl.models.llama import LLAMA, MISTRAL
from minisgl.models.mixtral import MIXTRAL
from minisgl.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from minisgl.moe.base import Activation

FAMILIES: Mapping[str, Family] = {
    family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, GPT_OSS)
}
"""Architecture, as config.json names it -> family."""

_DEFAULTS: Config = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """The numbers of a decoder-only model.

    model_dim D; hidden_dim: width of a dense layer's MLP; windows: sliding window of each layer, None for
    full attention.
    qkv_bias, out_bias, mlp_bias: which projections have biases; qk_norm: RMSNorm over head_dim on q and k; sinks:
    a learned logit a head in attention.
    max_position: positions the model was made for. dtype: the checkpoint's own (float32 if config.json does
    not say).
    quantization: the method config.json names (for example "fp8"), None for plain weights.
    """

    architecture: str
    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sinks: bool
    tie_embeddings: bool
    dtype: torch.dtype
    moe: MoESpec | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    quantization: str | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a config.json dictionary. ValueError names the key and the remedy."""
        return _read_spec(config)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read config.json and, where there is one, generation_config.json (it may name more end tokens)."""
        spec = cls.from_config(_read_json(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.is_file():
            return spec
        more = _token_ids(_read_json(generation).get("eos_token_id"))
        return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *more))))

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def scale(self) -> float:
        """What multiplies q.k."""
        return self.head_dim**-0.5

    @property
    def context_length(self) -> int:
        """Positions the model serves once its rope scaling is counted."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer is MoE."""
        return self.moe is not None and layer in self.moe.sparse_layers


def find_family(config: Mapping[str, Any]) -> Family:
    """The family that config.json's `architectures` names; ValueError with the known ones otherwise."""
    known = ", ".join(FAMILIES)
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names:
        raise ValueError(f'config.json names no architecture: add "architectures" with one of {known}')
    raise ValueError(f"architecture {names[0]} is not served; known ones: {known}")


def _read_spec(raw: Mapping[str, Any]) -> ModelSpec:
    family = find_family(raw)
    present = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    config = {**_DEFAULTS, **family.defaults, **present}
    num_heads, num_layers = _count(config, "num_attention_heads"), _count(config, "num_hidden_layers")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    model_dim = _count(config, "hidden_size")
    head_dim = _count(config, "head_dim", model_dim // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"config.json: {num_heads} heads can't share {num_kv_heads} key/value heads evenly")
    spec = ModelSpec(
        architecture=family.architecture,
        num_layers=num_layers,
        model_dim=model_dim,
        hidden_dim=_count(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size"),
        max_position=_count(config, "max_position_embeddings"),
        norm_eps=float(config["rms_norm_eps"]),
        activation=_activation(config["hidden_act"]),
        rope=_read_rope(config, head_dim),
        windows=family.windows(config),
        qkv_bias=family.qkv_bias(config),
        out_bias=family.out_bias(config),
        mlp_bias=family.mlp_bias(config),
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_read_dtype(config),
        moe=_read_moe(family, config),
        eos_ids=_token_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        quantization=(config.get("quantization_config") or {}).get("quant_method"),
    )
    return spec


def _read_moe(family: Family, config: Config) -> MoESpec | None:
    if family.moe is None:
        return None
    try:
        moe = family.moe(config)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]!r}, which {family.architecture} needs") from None
    if not moe.sparse_layers:
        return None
    if not 1 <= moe.rule.top_k <= moe.num_experts:
        raise ValueError(f"config.json: can't choose {moe.rule.top_k} of {moe.num_experts} experts")
    return replace(moe, activation=_activation(config["hidden_act"])) if moe.activation == "silu" else moe


def _read_rope(config: Config, head_dim: int) -> RopeSpec:
    """Both styles: a `rope_parameters` dictionary, or `rope_theta` beside `rope_scaling`."""
    rope: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"config.json: rope type {kind!r} is not served; known ones: {', '.join(ROPE_KINDS)}"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2:
        raise ValueError(f"config.json: {rotary_dim} rotary dimensions a head; rotation needs pairs")
    max_position = _count(config, "max_position_embeddings")
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    spec = RopeSpec(
        rotary_dim=rotary_dim,
        theta=float(rope.get("rope_theta") or config["rope_theta"]),
        kind=kind,
        max_position=max_position,
        original_max_position=int(original or max_position),
    )
    if kind == "default":
        return spec
    numbers = dict(rope)
    if kind == "yarn" and rope.get("factor") is None:
        numbers["factor"] = max_position / spec.original_max_position
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if lacking := [key for key in needed if numbers.get(key) is None]:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(lacking)}")
    spec = replace(spec, **{key: float(numbers[key]) for key in needed})
    return _read_yarn(spec, rope) if kind == "yarn" else spec


def _read_yarn(spec: RopeSpec, rope: Mapping[str, Any]) -> RopeSpec:
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(spec.factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return replace(
        spec,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=float(attention_factor),
    )


def _read_dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"config.json: dtype {name!r} is not served; known ones: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act {name!r} is not served; known ones: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _count(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"config.json lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a Hugging Face model folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the model again") from error
