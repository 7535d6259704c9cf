"""Tiny random Hugging Face models of every served family, saved as real checkpoints: what end-to-end tests
compare with.

Weights are drawn wide (deviation 0.2, biases and norms random too), so that logits spread, experts differ
clearly and a forgotten bias or norm shows. Every folder has a byte-level tokenizer of 256 bytes and three
special tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto import AutoModelForCausalLM

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 272  # a little more than the tokenizer knows, as real checkpoints pad their embedding

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **numbers}}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama_bias": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama_linear": (LlamaConfig, _rope("linear", factor=2.0)),
    "llama_dynamic": (LlamaConfig, {"max_position_embeddings": 48, **_rope("dynamic", factor=4.0)}),
    "llama_llama3": (LlamaConfig, _rope("llama3", factor=8.0, **_LLAMA3)),
    "llama_yarn": (LlamaConfig, _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral_window": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeConfig, {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_tied": (Qwen3MoeConfig, {**_QWEN3_MOE, "tie_word_embeddings": True, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        Qwen3MoeConfig,
        {**_QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 8,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=128, truncate=False),
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
"""Name of a tiny model -> its configuration class and what it changes."""


def make_model(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    fused_experts: bool = False,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> PreTrainedModel:
    """Save the model called `name` (a key of CONFIGS) into `folder` and return it, in evaluation mode.

    fused_experts: write gate_up_proj [E, 2F, D] instead of one tensor an expert. max_shard_size: a small
    one, e.g. "50KB", splits the file and adds an index. changes: further keys of the configuration.
    """
    config_class, own = CONFIGS[name]
    config = config_class(**{**_COMMON, **own, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=not fused_experts)
    make_tokenizer().save_pretrained(folder)
    return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter: vectors that are one at the start (norms) stay near one, all others are normal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and parameter.ndim == 1
            parameter.copy_(1 + 0.1 * noise if is_norm else 0.2 * noise)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "<s>", "</s>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts without special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens Hugging Face generates greedily, end tokens ignored: one at a time, with its key/value
    cache.
    """
    cache, ids, out = None, torch.tensor([prompt]), []
    for _ in range(max_tokens):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        ids = result.logits[:, -1:].argmax(dim=-1)
        out.append(int(ids))
    return out
