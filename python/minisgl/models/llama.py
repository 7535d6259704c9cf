"""Llama and Mistral: the common reading; Mistral adds a sliding window on every layer, without biases."""

from __future__ import annotations

from minisgl.models.family import Family, never, window_everywhere

LLAMA = Family("LlamaForCausalLM")

MISTRAL = Family(
    "MistralForCausalLM",
    defaults={"sliding_window": 4096},
    qkv_bias=never,
    out_bias=never,
    mlp_bias=never,
    windows=window_everywhere,
)
