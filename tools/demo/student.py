"""The student: Qwen3-MoE as transformers defines it, written for fast training of a very small model.

Same arithmetic, same checkpoint names, other shape: projections that share an input are one matrix, the experts' weights are
stacked, and routes are sorted by expert so that one grouped matrix product serves all experts. Parameters stay in fp32 and are
cast to the activations' type where they are used; the router always computes in fp32.

Shape letters: B sequences, S positions, T = B * S tokens, K experts a token, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


@dataclass(frozen=True)
class StudentConfig:
    """Numbers of the model. The defaults are the bundled demo: 8.8M parameters, of which a token uses 2.6M."""

    vocab_size: int = 4096
    hidden: int = 192
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    top_k: int = 4
    expert_hidden: int = 64
    context: int = 1024
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def to_hf(self) -> dict[str, Any]:
        """config.json for `Qwen3MoeForCausalLM`."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.top_k * self.expert_hidden,  # of dense layers, of which there are none
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class _PermuteRows(torch.autograd.Function):
    """rows[index] for a permutation: its backward is a gather too, where plain indexing would scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """x [B, S, H, dim], rotary [2, S, dim] fp32."""
    half = x.shape[-1] // 2
    wide = x.float()
    swapped = torch.cat([-wide[..., half:], wide[..., :half]], dim=-1)
    return (wide * rotary[0, :, None] + swapped * rotary[1, :, None]).to(x.dtype)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        c = self.config = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden))
        self.qkv = nn.Parameter(torch.empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.output = nn.Parameter(torch.empty(c.hidden, c.num_heads * c.head_dim))
        self.post_norm = nn.Parameter(torch.ones(c.hidden))
        self.router = nn.Parameter(torch.empty(c.num_experts, c.hidden))
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * c.expert_hidden, c.hidden))
        self.down = nn.Parameter(torch.empty(c.num_experts, c.hidden, c.expert_hidden))

    def attention(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        c, (batch, length, _) = self.config, x.shape
        heads = F.linear(x, self.qkv.to(x.dtype)).view(batch, length, -1, c.head_dim)
        query, key, value = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=2)
        query = _rotate(_norm(query, self.q_norm, c.eps), rotary)
        key = _rotate(_norm(key, self.k_norm, c.eps), rotary)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.output.to(x.dtype))

    def experts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, D] -> (sum of the chosen experts [T, D], balance loss [], tokens of each expert [E])."""
        c, num_tokens = self.config, x.shape[0]
        probability = F.linear(x.float(), self.router).softmax(-1)
        weight, expert = probability.topk(c.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)

        expert_sorted, order = expert.flatten().sort()
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        edges = torch.arange(1, c.num_experts + 1, device=x.device)
        ends = torch.searchsorted(expert_sorted, edges, out_int32=True)  # routes of experts 0..e
        counts = ends.diff(prepend=ends.new_zeros(1))

        rows = x.unsqueeze(1).expand(-1, c.top_k, -1).reshape(-1, c.hidden)
        rows = _PermuteRows.apply(rows, order, inverse)
        gate, up = F.grouped_mm(rows, self.gate_up.to(x.dtype).transpose(1, 2), offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down.to(x.dtype).transpose(1, 2), offs=ends)
        rows = _PermuteRows.apply(rows, inverse, order).view(num_tokens, c.top_k, c.hidden)
        mixed = (rows.float() * weight.unsqueeze(-1)).sum(1).to(x.dtype)

        share = counts.float() / (num_tokens * c.top_k)
        balance = (
            c.num_experts * (share * probability.mean(0)).sum()
        )  # 1 when even (Switch Transformer, eq. 4)
        return mixed, balance, counts

    def forward(
        self, x: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x + self.attention(_norm(x, self.input_norm, self.config.eps), rotary)
        mixed, balance, counts = self.experts(_norm(x, self.post_norm, self.config.eps).flatten(0, 1))
        return x + mixed.view_as(x), balance, counts


class Student(nn.Module):
    """The whole model; `forward` returns what training and evaluation need."""

    def __init__(self, config: StudentConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(config.context).float(), frequency).repeat(1, 2)
        self.register_buffer("rotary", torch.stack([angle.cos(), angle.sin()]), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of standard deviation 0.02 (down-scaled into the residual stream), as GPT-2 does."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith(("output", "down"))
                std = 0.02 * (self.config.hidden / 192) ** -0.5
                nn.init.normal_(
                    parameter, std=std * (2 * self.config.num_layers) ** -0.5 if into_residual else std
                )

    def hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [B, S] -> (last hidden states [B, S, D], mean balance loss [], tokens of each expert [layers, E])."""
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        rotary = self.rotary[:, : tokens.shape[1]]
        balances, counts = [], []
        for block in self.blocks:
            x, balance, count = block(x, rotary)
            balances.append(balance)
            counts.append(count)
        return _norm(x, self.norm, self.config.eps), torch.stack(balances).mean(), torch.stack(counts)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, S] -> fp32 logits [B, S, V]."""
        return F.linear(self.hidden(tokens)[0], self.embedding.to(self.dtype)).float()

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean cross entropy in nats, mean balance loss, tokens of each expert [layers, E]."""
        hidden, balance, counts = self.hidden(tokens)
        return token_loss(hidden, self.embedding, targets), balance, counts


def token_loss(hidden: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of hidden [B, S, D] against targets [B, S] with the tied output matrix."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten())


def hf_tensors(model: Student) -> dict[str, torch.Tensor]:
    """All weights under transformers' on-disk names, one tensor an expert and projection, in fp32."""
    c = model.config
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for index, block in enumerate(model.blocks):
        prefix = f"model.layers.{index}."
        rows = [c.num_heads * c.head_dim] + [c.num_kv_heads * c.head_dim] * 2
        for letter, weight in zip("qkv", block.qkv.split(rows), strict=True):
            tensors[f"{prefix}self_attn.{letter}_proj.weight"] = weight
        tensors |= {
            f"{prefix}input_layernorm.weight": block.input_norm,
            f"{prefix}self_attn.q_norm.weight": block.q_norm,
            f"{prefix}self_attn.k_norm.weight": block.k_norm,
            f"{prefix}self_attn.o_proj.weight": block.output,
            f"{prefix}post_attention_layernorm.weight": block.post_norm,
            f"{prefix}mlp.gate.weight": block.router,
        }
        for expert in range(c.num_experts):
            gate, up = block.gate_up[expert].chunk(2)
            tensors |= {
                f"{prefix}mlp.experts.{expert}.gate_proj.weight": gate,
                f"{prefix}mlp.experts.{expert}.up_proj.weight": up,
                f"{prefix}mlp.experts.{expert}.down_proj.weight": block.down[expert],
            }
    return {name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in tensors.items()}


def save_hf(model: Student, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    tensors = {name: tensor.to(dtype) for name, tensor in hf_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    for name, value in (("config.json", model.config.to_hf()), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
