"""How many weights and bytes a model has, from its spec alone: what planning and the memory ledger count
with.

Letters: D model dim, F hidden dim, H heads, G key/value heads, C head_dim, E experts, V vocabulary.
"""

from __future__ import annotations

from minisgl.models.spec import ModelSpec


def attention_params(spec: ModelSpec) -> int:
    """Weights of one layer's attention: q, k, v, out, their biases and the head norms."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = spec.model_dim * (2 * q + 2 * kv)
    biases = spec.qkv_bias * (q + 2 * kv) + spec.out_bias * spec.model_dim
    return matrices + biases + spec.qk_norm * 2 * spec.head_dim


def expert_params(spec: ModelSpec) -> int:
    """Weights of one expert (gate, up, down and, where the model has them, their biases); 0 for a dense
    model.
    """
    if spec.moe is None:
        return 0
    width = spec.moe.hidden_dim
    return 3 * spec.model_dim * width + spec.moe.expert_bias * (2 * width + spec.model_dim)


def moe_layer_params(spec: ModelSpec, experts: int) -> int:
    """Weights of one MoE layer that holds `experts` of its experts: those, the router and the shared
    experts.
    """
    if spec.moe is None:
        return 0
    moe = spec.moe
    router = moe.num_experts * (spec.model_dim + moe.router_bias + moe.correction_bias)
    shared = 3 * spec.model_dim * moe.shared_hidden_dim + moe.shared_gate * spec.model_dim
    return experts * expert_params(spec) + router + shared


def dense_layer_params(spec: ModelSpec) -> int:
    """Weights of one dense layer's MLP."""
    return 3 * spec.model_dim * spec.hidden_dim + spec.mlp_bias * (2 * spec.hidden_dim + spec.model_dim)


def _total(spec: ModelSpec, experts: int) -> int:
    sparse = len(spec.moe.sparse_layers) if spec.moe else 0
    norms = (2 * spec.num_layers + 1) * spec.model_dim
    embeddings = (1 if spec.tie_embeddings else 2) * spec.vocab_size * spec.model_dim
    mlps = sparse * moe_layer_params(spec, experts) + (spec.num_layers - sparse) * dense_layer_params(spec)
    return embeddings + norms + spec.num_layers * attention_params(spec) + mlps


def num_params(spec: ModelSpec) -> int:
    """All weights. Qwen3-30B-A3B: 30.5 G, of which 28.99 G are experts."""
    return _total(spec, spec.moe.num_experts if spec.moe else 0)


def num_active_params(spec: ModelSpec) -> int:
    """Weights one token meets, the whole embedding counted. Qwen3-30B-A3B: 3.35 G."""
    return _total(spec, spec.moe.rule.top_k if spec.moe else 0)


def num_expert_params(spec: ModelSpec) -> int:
    """Weights of all experts of all layers: what an expert store holds."""
    return expert_params(spec) * spec.moe.num_experts * len(spec.moe.sparse_layers) if spec.moe else 0


def num_dense_params(spec: ModelSpec) -> int:
    """Everything but the experts: what is always on the device."""
    return num_params(spec) - num_expert_params(spec)


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int = 2) -> int:
    """Bytes of keys and values of one token over all layers. Qwen3-30B-A3B in bf16: 98,304."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes
