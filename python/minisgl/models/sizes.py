"""How many weights and bytes a model has, from its spec alone: what planning and the memory ledger count
with.

Letters: D model dim, F hidden dim, H heads, G key/value heads, C head_dim, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from minisgl.layers.fp8 import Fp8Storage
from minisgl.models.dense import DenseStorage
from minisgl.models.spec import ModelSpec
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import get_format


def attention_params(spec: ModelSpec) -> int:
    """Weights of one layer's attention: q, k, v, out, their biases, the head norms and the sinks."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = spec.model_dim * (2 * q + 2 * kv)
    biases = spec.qkv_bias * (q + 2 * kv) + spec.out_bias * spec.model_dim
    return matrices + biases + spec.qk_norm * 2 * spec.head_dim + spec.sinks * spec.num_heads


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


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int = 2, num_ranks: int = 1) -> int:
    """Bytes of keys and values of one token over all layers, on one of `num_ranks` GPUs: 2 x head_dim x
    ceil(kv_heads / ranks) x itemsize x layers. Qwen3-30B-A3B in bf16: 98,304.
    """
    return 2 * spec.head_dim * -(-spec.num_kv_heads // num_ranks) * element_bytes * spec.num_layers


@dataclass(frozen=True)
class ModelSizes:
    """A model as the numbers that decide its memory: what the engine's ledger and the planner both count with.

    `model_sizes` makes one from a spec; the planner also makes one from config.json of a family the engine doesn't serve.

    params: weights over all layers by part, routed experts excepted (`PARTS` names them in the order to show). whole: how many
    of these every rank keeps for itself when several share the model; norms and routers are always kept whole.
    wide_params: how many of these stay float32 whatever the dtype (correction biases of routers).
    expert: D, F and bias of one routed expert, None for a dense model; num_experts a layer, top_k, num_sparse layers.
    kv_elements_L: elements one token adds to each layer's cache: 2 x kv_heads x head_dim, less for compressed caches, 0 for
    layers without one. windows_L: sliding window of each layer, None for all positions. state_elements: elements of a
    request that do not grow with its length (linear attention).
    """

    num_layers: int
    model_dim: int
    hidden_dim: int
    vocab_size: int
    context_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    params: Mapping[str, int]
    kv_elements_L: tuple[int, ...]
    windows_L: tuple[int | None, ...]
    whole: Mapping[str, int] = field(default_factory=dict)
    wide_params: int = 0
    state_elements: int = 0
    qk_norm: bool = False
    expert: ExpertShape | None = None
    num_experts: int = 0
    top_k: int = 0
    num_sparse: int = 0

    @property
    def dense_params(self) -> int:
        """Everything but routed experts: what is always on the device."""
        return sum(self.params.values())

    @property
    def params_per_expert(self) -> int:
        if self.expert is None:
            return 0
        width, dim = self.expert.hidden_dim, self.expert.model_dim
        return 3 * dim * width + self.expert.bias * (2 * width + dim)

    @property
    def expert_params(self) -> int:
        """Routed experts of all layers."""
        return self.params_per_expert * self.num_experts * self.num_sparse

    @property
    def total_params(self) -> int:
        return self.dense_params + self.expert_params

    @property
    def active_params(self) -> int:
        """Weights one token meets, the whole embedding counted."""
        return self.dense_params + self.params_per_expert * self.top_k * self.num_sparse

    def dense_bytes(self, dtype: torch.dtype, storage: DenseStorage | None = None) -> int:
        """Bytes of the dense weights in the engine's memory: params x itemsize, and four bytes for the few that stay float32.

        storage: what of them is fp8 (counted for grouped attention), and whether the embedding is elsewhere
        (`embedding_bytes`).
        """
        storage = storage or DenseStorage()
        plain = self.dense_params * dtype.itemsize + self.wide_params * (4 - dtype.itemsize)
        if storage.embedding_on_host:
            plain -= self.embedding_bytes(dtype)
        if storage.fp8 is None:
            return plain
        q, kv, dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.model_dim
        per_layer = fp8_bytes(storage.fp8, q + 2 * kv, dim) + fp8_bytes(storage.fp8, dim, q)
        replaced = self.num_layers * dim * 2 * (q + kv) + self.params["head"]
        head = 0
        if not storage.shares_head(self.tied):
            head = fp8_bytes(storage.fp8, self.params["embedding"] // dim, dim)
        return plain - replaced * dtype.itemsize + self.num_layers * per_layer + head

    def embedding_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the embedding, which is never quantized."""
        return self.params["embedding"] * dtype.itemsize

    def record_bytes(self, weight_format: str, dtype: torch.dtype, group_size: int = 128) -> int:
        """Bytes of one stored expert, scales, biases and padding included; 0 for a dense model.

        weight_format: a value of --moe-expert-quantization. ValueError where the format can't store this shape.
        """
        if self.expert is None:
            return 0
        return get_format(weight_format, dtype, group_size).bytes_per_expert(self.expert)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes one token takes in the KV pool, which keeps every position of every layer."""
        return sum(self.kv_elements_L) * dtype.itemsize


def fp8_bytes(storage: Fp8Storage, num_rows: int, num_cols: int) -> int:
    """Bytes of one fp8 weight: a code each, and float32 scales."""
    return num_rows * (num_cols + 4 * storage.num_groups(num_cols))


PARTS = ("embedding", "head", "attention", "norms", "router", "shared experts", "dense MLPs")
"""Parts of `ModelSizes.params`, in the order to show them."""


def model_sizes(spec: ModelSpec) -> ModelSizes:
    """The sizes of a served model. Sums equal `num_params` and `num_dense_params`."""
    moe = spec.moe
    sparse = len(moe.sparse_layers) if moe else 0
    shared = 0
    if moe is not None and moe.shared_hidden_dim:
        shared = 3 * spec.model_dim * moe.shared_hidden_dim + moe.shared_gate * spec.model_dim
    embedding = spec.vocab_size * spec.model_dim
    return ModelSizes(
        num_layers=spec.num_layers,
        model_dim=spec.model_dim,
        hidden_dim=spec.hidden_dim,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        tied=spec.tie_embeddings,
        params={
            "embedding": embedding,
            "head": 0 if spec.tie_embeddings else embedding,
            "attention": spec.num_layers * attention_params(spec),
            "norms": (2 * spec.num_layers + 1) * spec.model_dim,
            "router": sparse * (moe_layer_params(spec, 0) - shared),
            "shared experts": sparse * shared,
            "dense MLPs": (spec.num_layers - sparse) * dense_layer_params(spec),
        },
        kv_elements_L=(2 * spec.num_kv_heads * spec.head_dim,) * spec.num_layers,
        windows_L=spec.windows,
        whole={
            "attention": spec.num_layers
            * (spec.out_bias * spec.model_dim + spec.qk_norm * 2 * spec.head_dim),
            "shared experts": sparse * moe.shared_gate * spec.model_dim if moe and shared else 0,
            "dense MLPs": (spec.num_layers - sparse) * spec.mlp_bias * spec.model_dim,
        },
        wide_params=sparse * moe.num_experts * moe.correction_bias if moe else 0,
        qk_norm=spec.qk_norm,
        expert=ExpertShape(spec.model_dim, moe.hidden_dim, moe.expert_bias) if moe else None,
        num_experts=moe.num_experts if moe else 0,
        top_k=moe.rule.top_k if moe else 0,
        num_sparse=sparse,
    )


def shard_sizes(sizes: ModelSizes, num_ranks: int, expert_parallel: bool = False) -> ModelSizes:
    """What one of `num_ranks` GPUs holds: heads, widths and the vocabulary are divided; norms, routers and the biases of sums
    over ranks are repeated (`ModelSizes.whole`).

    Key/value heads are repeated where there are fewer than ranks: ceil(kv_heads / ranks) each. A compressed (MLA) cache is
    shared by all heads, so every rank keeps all of it. Experts: expert_parallel gives each rank ceil(E / ranks) whole ones,
    otherwise it gets F / ranks of each. Raises ValueError where heads or F can't be divided.
    """
    if num_ranks == 1:
        return sizes
    width = sizes.expert.hidden_dim if sizes.expert else 0
    for name, value in (
        ("attention heads", sizes.num_heads),
        ("expert width", 0 if expert_parallel else width),
    ):
        if value % num_ranks:
            raise ValueError(f"{value} {name} can't be divided among {num_ranks} GPUs; use a divisor of it")
    kv_heads = -(-sizes.num_kv_heads // num_ranks)
    grouped = 2 * sizes.num_kv_heads * sizes.head_dim
    kv_params = sum(sizes.model_dim * n for n in sizes.kv_elements_L if n == grouped)
    whole = {**sizes.whole, **{name: sizes.params[name] for name in ("norms", "router")}}
    repeated = {name: whole.get(name, 0) for name in sizes.params}
    params = {name: repeated[name] - (repeated[name] - n) // num_ranks for name, n in sizes.params.items()}
    rest = sizes.params["attention"] - kv_params - repeated["attention"]
    own_kv = kv_params * kv_heads // sizes.num_kv_heads
    params["attention"] = repeated["attention"] - -rest // num_ranks + own_kv
    for name in ("embedding", "head"):
        params[name] = -(-sizes.vocab_size // num_ranks) * sizes.model_dim * bool(sizes.params[name])
    expert, num_experts = sizes.expert, sizes.num_experts
    if expert is not None and expert_parallel:
        num_experts = -(-num_experts // num_ranks)
    elif expert is not None:
        expert = replace(expert, hidden_dim=width // num_ranks)
    return replace(
        sizes,
        num_heads=sizes.num_heads // num_ranks,
        num_kv_heads=kv_heads,
        params=params,
        kv_elements_L=tuple(
            2 * kv_heads * sizes.head_dim if n == grouped else n for n in sizes.kv_elements_L
        ),
        expert=expert,
        num_experts=num_experts,
        state_elements=-(-sizes.state_elements // num_ranks),
    )
