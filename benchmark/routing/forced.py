"""Forcing which experts a model uses, through the seam that decides it: a backend whose `route` answers from a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minisgl.moe.backend import MoeBackend, MoeStep
from minisgl.moe.base import Problem, Routing, RoutingRule
from minisgl.moe.store import device_cache
from minisgl.moe.store.records import ExpertRecords


class ForcedRouting:
    """Expert ids of every layer: those of `ids_LTK` for steps of `batch` tokens, random ones for all others, which are prompts.

    Prompts need it too: random weights send most tokens to a few experts, which no trained model does.
    """

    def __init__(self, num_layers: int, batch: int, top_k: int, device: torch.device) -> None:
        self.batch = batch
        self.ids_LTK = torch.zeros((num_layers, batch, top_k), dtype=torch.int32, device=device)
        self._weights_TK: dict[int, torch.Tensor] = {}
        self._prompts_TK: dict[tuple[int, int], torch.Tensor] = {}
        self._num_drawn = 0
        self._weights(batch)  # not while a graph is captured

    def routing(self, layer: int, num_tokens: int, num_experts: int) -> Routing:
        """Of a step of so many tokens; nothing is launched but at the first call for a prompt's length."""
        if num_tokens == self.batch:
            return Routing(self.ids_LTK[layer], self._weights(num_tokens))
        return Routing(self._prompt(layer, num_tokens, num_experts), self._weights(num_tokens))

    def draw_prompt(self, num_tokens: int, num_experts: int) -> None:
        """New ids for prompts of so many tokens: a prompt that was seen before would find its experts in the caches."""
        self._num_drawn += 1
        for layer in range(len(self.ids_LTK)):
            self._prompts_TK.pop((layer, num_tokens), None)
            self._prompt(layer, num_tokens, num_experts)

    def _weights(self, num_tokens: int) -> torch.Tensor:
        if num_tokens not in self._weights_TK:
            top_k = self.ids_LTK.shape[2]
            shape = (num_tokens, top_k)
            self._weights_TK[num_tokens] = torch.full(shape, 1 / top_k, device=self.ids_LTK.device)
        return self._weights_TK[num_tokens]

    def _prompt(self, layer: int, num_tokens: int, num_experts: int) -> torch.Tensor:
        key = (layer, num_tokens)
        if key not in self._prompts_TK:
            device = self.ids_LTK.device
            seed = (self._num_drawn * 1009 + layer) * 1_000_003 + num_tokens
            generator = torch.Generator(device).manual_seed(seed)
            drawn = torch.rand((num_tokens, num_experts), generator=generator, device=device)
            self._prompts_TK[key] = drawn.topk(self.ids_LTK.shape[2]).indices.int()
        return self._prompts_TK[key]


class ForcedBackend:
    """A backend whose routing is decided elsewhere: the test double of `route`. The router still runs, for its time."""

    def __init__(self, inner: MoeBackend, forced: ForcedRouting, layer: int) -> None:
        self._inner, self._forced, self._layer = inner, forced, layer
        self.name, self.graph_safe = inner.name, inner.graph_safe

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        return self._inner.supports(problem, device)

    def route(
        self,
        logits_TE: torch.Tensor,
        rule: RoutingRule,
        bias_E: torch.Tensor | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> Routing:
        self._inner.route(logits_TE, rule, bias_E, num_valid)
        return self._forced.routing(self._layer, *logits_TE.shape)

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> MoeStep:
        return self._inner.begin(x_TD, routing, problem)


@contextmanager
def one_layer_of_random_weights() -> Iterator[None]:
    """Every layer gets copies of the first one's experts: drawing and quantizing 29 G weights takes longer than measuring."""
    fill, first = ExpertRecords.fill_random, []

    def fill_once(self: ExpertRecords, seed: int, std: float = 0.02) -> None:
        if first:
            self.records_EB.copy_(first[0].records_EB)
        else:
            fill(self, seed, std)
            first.append(self)

    ExpertRecords.fill_random = fill_once
    try:
        yield
    finally:
        ExpertRecords.fill_random = fill


@contextmanager
def prompts_by(who: str) -> Iterator[None]:
    """Prompts are planned by the "device" or by the "host", however long they are; "auto": as the store chooses."""
    chooses = device_cache.passes
    if who != "auto":
        device_cache.passes = lambda *_: who == "device"
    try:
        yield
    finally:
        device_cache.passes = chooses
