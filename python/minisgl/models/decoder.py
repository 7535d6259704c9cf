"""The one decoder that serves every family: what differs between them is a field of `ModelSpec`, never a
branch here.

    ids -> embedding -> layers x (norm, attention, norm, dense MLP or MoE) -> norm -> lm_head -> logits

All state of a step comes in as arguments (`DecoderInput`, caches); the decoder holds weights only, so the
same call runs eagerly, is captured in a CUDA graph, and is tested without an engine. Nothing in it waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minisgl.attention.base import AttentionBackend, AttentionBatch, AttentionProblem, LayerCache
from minisgl.layers.attention import Attention, Heads, Projections
from minisgl.layers.embedding import Embedding, LmHead
from minisgl.layers.fp8 import Fp8Storage, Fp8Weight
from minisgl.layers.linear import Linear, MergedLinear, Shards
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import MoELayer
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary
from minisgl.models.dense import DenseStorage
from minisgl.models.experts import MoeFactory, resident_moe
from minisgl.models.spec import ModelSpec
from minisgl.parallel import SOLO, Group

AttentionFactory = Callable[[AttentionProblem], AttentionBackend]
"""Asked once for each distinct problem of the model (a window here, none there)."""


@dataclass(frozen=True)
class DecoderInput:
    """One step for all layers.

    input_ids_T, positions_T: int [T], a token's id and its place in its own sequence.
    batch: whose tokens these are and where their keys and values go. plans: what `Decoder.plan` gave for
    the batch. logit_rows_N: int64 [N], rows that need logits; None for all.
    num_valid: int32 [1] on the device: rows from this number on are padding and use no expert; None if all
    are real. logits_out: float32 [N, V] to write the logits into; None for a new tensor.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    batch: AttentionBatch
    plans: Mapping[AttentionProblem, Any]
    logit_rows_N: torch.Tensor | None = None
    num_valid: torch.Tensor | None = None
    logits_out: torch.Tensor | None = None


def layer_problems(
    spec: ModelSpec, page_size: int, dtype: torch.dtype, group: Group = SOLO
) -> tuple[AttentionProblem, ...]:
    """What each layer asks of attention on this rank, in layer order; equal problems compare equal.

    Raises ValueError if the ranks of `group` can't share the model's heads.
    """
    heads = Heads.share(spec.num_heads, spec.num_kv_heads, group)
    return tuple(
        AttentionProblem(
            num_heads=heads.q.length,
            num_kv_heads=heads.kv.length,
            head_dim=spec.head_dim,
            page_size=page_size,
            dtype=dtype,
            scale=spec.scale,
            window=window,
            has_sinks=spec.sinks,
        )
        for window in spec.windows
    )


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        problem: AttentionProblem,
        backend: AttentionBackend,
        moe: MoELayer | None,
        device: torch.device,
        group: Group,
        fp8: Fp8Storage | None = None,
    ) -> None:
        super().__init__()
        dtype, eps = problem.dtype, spec.norm_eps
        self.attention_norm = RMSNorm(spec.model_dim, eps, device=device, dtype=dtype)
        self.attention = Attention(
            spec.model_dim,
            problem,
            backend,
            projections=Projections(spec.qkv_bias, spec.out_bias, fp8),
            qk_norm_eps=eps if spec.qk_norm else None,
            device=device,
            heads=Heads.share(spec.num_heads, spec.num_kv_heads, group),
        )
        self.mlp_norm = RMSNorm(spec.model_dim, eps, device=device, dtype=dtype)
        self.moe = moe
        self.mlp = None
        if moe is None:
            self.mlp = GatedMLP(
                spec.model_dim,
                spec.hidden_dim,
                spec.activation,
                bias=spec.mlp_bias,
                device=device,
                dtype=dtype,
                group=group,
            )

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        step: DecoderInput,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer's contribution, residual stream without it): the next norm adds them."""
        x_TD, residual_TD = self.attention_norm.add(x_TD, residual_TD)
        plan = step.plans[self.attention.problem]
        x_TD = self.attention(x_TD, rotation, cache, step.batch, plan)
        x_TD, residual_TD = self.mlp_norm.add(x_TD, residual_TD)
        if self.moe is not None:
            return self.moe(x_TD, step.num_valid), residual_TD
        assert self.mlp is not None
        return self.mlp(x_TD), residual_TD


class Decoder(nn.Module):
    """Weights of a model, uninitialised until a loader fills them; on the meta device it occupies nothing.

    attention: chooses a backend for each kind of layer. page_size: of the KV cache. dtype: of weights and
    activations.
    moe_factory: builds the sparse layers; None for resident experts and the backend that suits the device.
    group: the ranks that share heads, hidden dims and vocabulary; each builds a decoder of its own.
    storage: how attention, embedding and lm_head are stored; None: in `dtype`, on the device.
    Many parameters, because each is chosen independently of all others.
    """

    def __init__(
        self,
        spec: ModelSpec,
        attention: AttentionFactory,
        *,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        moe_factory: MoeFactory | None = None,
        group: Group = SOLO,
        storage: DenseStorage | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.device, self.dtype, self.group = spec, device, dtype, group
        self.storage = storage = storage or DenseStorage()
        problems = layer_problems(spec, page_size, dtype, group)
        self.backends = {problem: attention(problem) for problem in dict.fromkeys(problems)}
        make_moe = moe_factory or resident_moe(spec, device=device, dtype=dtype, group=group)
        self.embedding = Embedding(
            spec.vocab_size,
            spec.model_dim,
            device=device,
            dtype=dtype,
            group=group,
            on_host=storage.embedding_on_host,
        )
        self.rotary = Rotary(spec.rope, device)
        self.layers = nn.ModuleList()
        for index, problem in enumerate(problems):
            moe = make_moe(index, spec.moe) if spec.moe is not None and spec.is_sparse(index) else None
            backend = self.backends[problem]
            self.layers.append(DecoderLayer(spec, problem, backend, moe, device, group, storage.fp8))
        self.norm = RMSNorm(spec.model_dim, spec.norm_eps, device=device, dtype=dtype)
        tied_to = self.embedding if storage.shares_head(spec.tie_embeddings) else None
        self.lm_head = LmHead(
            spec.vocab_size,
            spec.model_dim,
            tied_to=tied_to,
            device=device,
            dtype=dtype,
            group=group,
            fp8=storage.fp8,
        )

    def plan(self, batch: AttentionBatch) -> dict[AttentionProblem, Any]:
        """Once a step, before `forward`: every attention backend's preparation, by problem."""
        return {problem: backend.plan(problem, batch) for problem, backend in self.backends.items()}

    def forward(self, step: DecoderInput, caches: Sequence[LayerCache]) -> torch.Tensor:
        """logits float32 [N, V] of the rows asked for. caches: one a layer; this step's keys and values are
        added.
        """
        return self.lm_head(self.hidden(step, caches), step.logits_out)

    def hidden(self, step: DecoderInput, caches: Sequence[LayerCache]) -> torch.Tensor:
        """What `lm_head` makes logits of, [N, D]: for who wants them of more rows than memory has logits for."""
        x_TD = self.embedding(step.input_ids_T)
        rotation = self.rotary(step.positions_T, self.dtype)
        residual_TD = None
        for layer, cache in zip(self.layers, caches):
            x_TD, residual_TD = layer(x_TD, residual_TD, rotation, step, cache)
        if step.logit_rows_N is not None:
            x_TD = x_TD[step.logit_rows_N]
            residual_TD = None if residual_TD is None else residual_TD[step.logit_rows_N]
        return self.norm.add(x_TD, residual_TD)[0]

    def moe_layers(self) -> dict[int, MoELayer]:
        """Sparse layers by index: their stores load experts and report bytes."""
        return {i: layer.moe for i, layer in enumerate(self.layers) if isinstance(layer.moe, MoELayer)}

    def places(self) -> dict[str, torch.Tensor]:
        """Where every tensor but the experts finally lives, by our name, e.g. `layers.0.attention.q.weight`.

        Merged weights appear as their parts; a lm_head that is the embedding does not appear. `fp8_weights` names the places
        that hold codes.
        """
        out: dict[str, torch.Tensor] = {}
        for path, module in self.named_modules():
            if isinstance(module, Linear):
                out.update({f"{_place_path(path, module)}.{name}": t for name, t in module.places().items()})
            else:
                out.update({f"{path}.{name}": p for name, p in module.named_parameters(recurse=False)})
        if self.storage.shares_head(self.spec.tie_embeddings):
            del out["lm_head.weight"]
        return out

    def fp8_weights(self) -> dict[str, Fp8Weight]:
        """Those of `places` that hold fp8 codes, with their scales."""
        return {
            f"{_place_path(path, module)}.{name}": weight
            for path, module in self.named_modules()
            if isinstance(module, Linear)
            for name, weight in module.fp8_weights().items()
        }

    def shards(self) -> Shards:
        """Places that hold only a part of the checkpoint's tensor, by the names of `places`: (dim, part of it)."""
        return {
            f"{_place_path(path, module)}.{name}": shard
            for path, module in self.named_modules()
            if isinstance(module, (Linear, Embedding, Attention))
            for name, shard in module.shards().items()
        }

    def num_bytes(self) -> tuple[int, int]:
        """Bytes of everything but the experts: (in the decoder's memory, of an embedding that was left to the host)."""
        total = sum(parameter.nbytes for parameter in self.parameters())
        host = self.embedding.weight.nbytes if self.storage.embedding_on_host else 0
        return total - host, host


def _place_path(path: str, module: nn.Module) -> str:
    """What the places of a module are called: a merged weight's parts stand for themselves."""
    return path.rpartition(".")[0] if isinstance(module, MergedLinear) else path
