"""Cut a dense Llama checkpoint into a Mixtral-style mixture of experts that computes exactly the same function.

    python tools/upcycle.py smollm2 build/smollm2-moe

A SwiGLU MLP is a sum over its hidden units, so it may be cut into E slices of units whose outputs add up. Each slice becomes an
expert. The router is all zeros and every expert is chosen, so each gets the weight 1/E; multiplying the down projections by
E undoes that. With E a power of two both factors are exact in every float type, and only the order of additions differs
from the dense model: fp32 logits agree to about 1e-5 of their size.

Such a model has real weights and real activations without any training. What it does not have is real routing: every token uses
every expert. It tests kernels, formats and loaders, not caches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from minisgl.models.smollm2 import ensure_smollm2  # noqa: E402

#: What both architectures call by the same name in config.json.
SHARED_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype",
)  # fmt: skip
#: Llama's MLP matrices, and what Mixtral calls them.
EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
ROUTER = "block_sparse_moe.gate.weight"


def upcycle_config(config: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """config.json of the cut model. Raises ValueError for models that the cut cannot represent."""
    if config.get("model_type") != "llama":
        raise ValueError(
            f"model_type is {config.get('model_type')!r}: only Llama checkpoints can be cut this way"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(
            "Mixtral has no biases, so a Llama checkpoint with attention_bias or mlp_bias cannot be cut"
        )
    if num_experts < 2 or num_experts & (num_experts - 1):
        raise ValueError(f"{num_experts} experts: choose a power of two, so that scaling by it is exact")
    if config["intermediate_size"] % num_experts:
        raise ValueError(
            f"intermediate_size {config['intermediate_size']} is not divisible by {num_experts} experts"
        )
    return {key: config[key] for key in SHARED_KEYS if key in config} | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config["intermediate_size"] // num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_experts,
        "sliding_window": None,
    }


def upcycle_tensors(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The cut model's tensors: gate and up sliced by rows, down by columns and scaled, a zero router for every layer."""
    result = {}
    for name, weight in tensors.items():
        layer, found, part = name.partition("mlp.")
        part = part.removesuffix(".weight")
        if not found:
            result[name] = weight
            continue
        slices = weight.chunk(num_experts, dim=1 if part == "down_proj" else 0)
        for expert, piece in enumerate(slices):
            scaled = piece * num_experts if part == "down_proj" else piece
            result[f"{layer}block_sparse_moe.experts.{expert}.{EXPERT_NAMES[part]}.weight"] = (
                scaled.contiguous()
            )
        if part == "gate_proj":
            result[f"{layer}{ROUTER}"] = torch.zeros(num_experts, weight.shape[1], dtype=weight.dtype)
    return result


def upcycle(source: Path, target: Path, num_experts: int = 8) -> Path:
    """Write the cut model of the Hugging Face folder `source` into `target`, with the source's tokenizer; returns `target`."""
    config = upcycle_config(json.loads((source / "config.json").read_text()), num_experts)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{source} holds no .safetensors file")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(upcycle_tensors(tensors, num_experts), target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
    ):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    return target


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="folder of a Llama checkpoint, or 'smollm2'")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--experts", type=int, default=8, help="how many slices (default 8)")
    args = parser.parse_args(argv)
    source = ensure_smollm2() if args.source == "smollm2" else Path(args.source)
    print(upcycle(source, args.target, args.experts))


if __name__ == "__main__":
    main()
