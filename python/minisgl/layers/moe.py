"""The Mixture-of-Experts layer. Read this first; everything else in `moe/` is one of the parts it names.

    T tokens   K experts a token   E experts   D model dim   F expert hidden dim
    gate_up [E, 2F, D] (gate rows, then up rows)   down [E, D, F]

For one token x, the K experts chosen for it and their weights w:

    y = sum over k of  w_k * down_k(act(gate_k x) * up_k x)

`MoELayer.forward` is that sentence, step by step. Each axis can be exchanged without the others knowing:

    router + rule   which experts, with which weights          moe/base.py
    exchange        on which GPU a token meets its expert      moe/exchange/
    store           where weights live, in which slot          moe/store/
    format          how a weight is stored                     moe/formats/
    backend         who multiplies                             moe/torch_backend.py, moe/fused.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.launch import linear
from minisgl.moe.backend import MoeBackend
from minisgl.moe.base import Activation, ExpertShape, Problem, RoutingRule
from minisgl.moe.exchange import Exchange, Local, Rows
from minisgl.moe.formats import get_format
from minisgl.moe.store import ExpertStore, ResidentStore
from minisgl.moe.store.shard import ExpertShard


class Router(nn.Module):
    """Scores of all experts for each token, and the rule that reads them.

    weight [E, D] and bias [E] (gpt-oss) in the model's dtype make logits; choice_bias float32 [E]
    (DeepSeek-V3's e_score_correction_bias, ERNIE) has a say in the choice only. Parameters are left
    uninitialised, on any device.
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        rule: RoutingRule,
        *,
        bias: bool = False,
        choice_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def empty(*shape: int, dtype: torch.dtype | None = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        self.rule = rule
        self.weight = empty(num_experts, model_dim)
        self.bias = empty(num_experts) if bias else None
        self.choice_bias = empty(num_experts, dtype=torch.float32) if choice_bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """logits [T, E] in the model's dtype, as Hugging Face computes them; the rule goes on in float32."""
        return linear(x_TD, self.weight, self.bias)


class SharedExpert(nn.Module):
    """An expert that every token uses, beside the chosen ones; if gated, scaled by sigmoid(gate x) (Qwen2-MoE)."""

    def __init__(
        self,
        mlp: nn.Module,
        *,
        gated: bool = False,
        model_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mlp = mlp
        gate = torch.empty((1, model_dim), device=device, dtype=dtype) if gated else None
        self.gate = None if gate is None else nn.Parameter(gate, requires_grad=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = self.mlp(x_TD)
        return y_TD if self.gate is None else torch.sigmoid(F.linear(x_TD, self.gate)) * y_TD


class MoELayer(nn.Module):
    """Tokens in, tokens out; `store` holds the weights and is no part of the state dict."""

    def __init__(
        self,
        router: Router,
        store: ExpertStore,
        backend: MoeBackend,
        *,
        exchange: Exchange | None = None,
        activation: Activation = "silu",
        shared: nn.Module | None = None,
        shard: ExpertShard | None = None,
    ) -> None:
        """exchange: None means that this rank holds every expert. shared: added for every token.
        shard: what of the model's experts the store holds, for loading; None means all.

        Raises ValueError if the parts don't fit together or the backend can't compute the store's format.
        """
        super().__init__()
        num_experts = router.weight.shape[0]
        exchange = exchange or Local(num_experts)
        if (exchange.num_experts, exchange.num_local_experts) != (num_experts, store.num_experts):
            raise ValueError(
                f"the router names {num_experts} experts and the store holds {store.num_experts}, "
                f"but the exchange connects {exchange.num_experts} and {exchange.num_local_experts}"
            )
        self.router, self.shared = router, shared
        self.store, self.backend, self.exchange = store, backend, exchange
        self.shard = shard or ExpertShard.whole(num_experts, store.shape.hidden_dim)
        self.activation: Activation = activation
        self.guess: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
        """(x_TD, num_valid) -> ids_TK that the layer after this one will probably choose; None: nobody guesses."""
        if reason := backend.supports(self._problem(1, router.weight.dtype), store.device):
            raise ValueError(f"the {backend.name} backend can't serve this layer: {reason}")

    def forward(self, x_TD: torch.Tensor, num_valid: torch.Tensor | None = None) -> torch.Tensor:
        """y [T, D]. num_valid int32 [1]: rows from this number on are padding of a CUDA graph, and use no expert."""
        routing = self.backend.route(self.router(x_TD), self.router.rule, self.router.choice_bias, num_valid)
        if self.guess is not None:
            self.store.expect(partial(self.guess, x_TD, num_valid))
        sent = self.exchange.dispatch(x_TD, routing)
        y_TD = self.exchange.combine([self._experts(rows, num_valid is None) for rows in sent.parts], sent)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def guess_with(self, following: MoELayer) -> None:
        """Let the store fetch early what the following layer's router chooses for this layer's input: between neighbours the
        residual stream changes little, and with it the choice.
        """
        router, route = (
            following.router,
            following.backend.route,
        )  # as they are: a backend may come to be watched

        def guess(x_TD: torch.Tensor, num_valid: torch.Tensor | None) -> torch.Tensor:
            return route(router(x_TD), router.rule, router.choice_bias, num_valid).ids_TK

        self.guess = guess

    def _experts(self, rows: Rows, may_wait: bool) -> torch.Tensor:
        """Weighted sums [R, D] of this rank's experts; exactly zero for a row that has none here. may_wait: see
        `ExpertStore.place`.
        """
        step = self.backend.begin(rows.x_RD, rows.routing, self._problem(rows.x_RD.shape[0], rows.x_RD.dtype))
        for placement in self.store.place(rows.routing, step.awaits_records, may_wait):
            step.run(placement)
        return step.finish()

    def _problem(self, num_tokens: int, dtype: torch.dtype) -> Problem:
        return Problem(
            num_tokens=num_tokens,
            top_k=self.router.rule.top_k,
            num_slots=self.store.num_experts,
            num_experts=self.exchange.num_experts,
            shape=self.store.shape,
            format=self.store.format.name,
            dtype=dtype,
            activation=self.activation,
            group_size=self.store.format.group_size,
        )

    @property
    def gate_up(self) -> torch.Tensor:
        """float32 [E, 2F, D]: what the store means, also where it is quantized. For reading, not for speed."""
        return self.store.weight("gate_up")

    @property
    def down(self) -> torch.Tensor:
        """float32 [E, D, F], as `gate_up`."""
        return self.store.weight("down")

    @classmethod
    def from_tensors(
        cls,
        router_weight: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        rule: RoutingRule,
        backend: MoeBackend,
    ) -> MoELayer:
        """A resident layer from router_weight [E, D], gate_up [E, 2F, D] and down [E, D, F], stored in their
        dtype.
        """
        num_experts, model_dim, hidden_dim = down.shape
        shape = ExpertShape(model_dim, hidden_dim)
        store = ResidentStore(num_experts, shape, get_format("none", down.dtype), down.device)
        store.sink(None, "gate_up", gate_up)
        store.sink(None, "down", down)
        router = Router(num_experts, model_dim, rule, device=down.device, dtype=router_weight.dtype)
        router.weight.copy_(router_weight)
        return cls(router, store, backend)
