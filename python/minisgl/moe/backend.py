"""Contract of a MoE backend: the thing that multiplies. It sees a slab and slots, never experts, ranks or
caches.

    routing = backend.route(logits_TE, rule)
    step = backend.begin(x_TD, routing, problem)     # chooses kernels once
    for placement in store.place(routing, step.awaits_records):    # one wave or many
        step.run(placement)
    y_TD = step.finish()                             # fp32 sum over k, ascending

`PlainForward` adds the same five lines for plain weight tensors, so that every backend can be called, read
and compared without a store.
"""

from __future__ import annotations

from typing import Protocol

import torch

from minisgl.moe.base import Activation, ExpertShape, Placement, Problem, Routing, RoutingRule, Slab

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class MoeStep(Protocol):
    """One MoE layer call in flight. `run` may be called for several waves; `finish` exactly once.

    The kernel choice was made when the step began, so that one wave or many give the same bits. awaits_records: whether its
    kernels wait themselves for records that are on their way, see `Placement.arrival`.
    """

    @property
    def awaits_records(self) -> bool: ...

    def run(self, placement: Placement) -> None:
        """Compute the rows of every route whose slot is not -1; rows of other routes are left alone."""
        ...

    def finish(self) -> torch.Tensor:
        """y_TD in the activations' dtype: fp32 sum over k ascending of weight * row; routes that are -1 add
        exactly zero."""
        ...


class MoeBackend(Protocol):
    """One way to compute the experts, e.g. "torch" or "fused"."""

    name: str
    graph_safe: bool
    """Whether a step never waits for the device, so that a CUDA graph can hold it."""

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        """None if this backend can compute the problem on the device, else the reason in words."""
        ...

    def route(
        self,
        logits_TE: torch.Tensor,
        rule: RoutingRule,
        bias_E: torch.Tensor | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> Routing:
        """`moe.base.apply_rule`, possibly as one kernel; equal to that definition."""
        ...

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> MoeStep:
        """Choose kernels for this step and claim the rows buffer."""
        ...

    def reserve(self, problem: Problem, device: torch.device) -> None:
        """Take the scratch space of the largest step to come, so that no later one needs more."""
        ...

    def scratch_bytes(self, device: torch.device) -> int:
        """Bytes of scratch space kept between steps."""
        ...


class PlainForward:
    """A backend's call on plain tensors: gate_up [E, 2F, D] and down [E, D, F] in one float dtype, resident,
    one wave."""

    def forward(
        self: MoeBackend,
        hidden_states: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gating_output: torch.Tensor,
        topk: int,
        renormalize: bool,
    ) -> torch.Tensor:
        """y [T, D] in the dtype of hidden_states [T, D]; gating_output [T, E] are router logits.

        Raises ValueError for shapes, dtypes or devices that don't belong together.
        """
        _check_tensors(hidden_states, gate_up, down)
        expected = (hidden_states.shape[0], gate_up.shape[0])
        if gating_output.shape != expected:
            raise ValueError(
                f"gating_output must be [T, E] = {list(expected)}, not {list(gating_output.shape)}"
            )
        routing = self.route(gating_output, RoutingRule(topk, renormalize=renormalize))
        return run_plain(self, hidden_states, gate_up, down, routing)

    def forward_ids(
        self: MoeBackend,
        hidden_states: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        activation: Activation = "silu",
    ) -> torch.Tensor:
        """As `forward`, for a routing decided elsewhere: topk_ids [T, K] (-1: no expert) and topk_weights [T,
        K].

        Raises ValueError also for an id outside -1..E-1; looking costs one wait for the device.
        """
        _check_tensors(hidden_states, gate_up, down)
        routing = _checked_routing(topk_ids, topk_weights, hidden_states.shape[0], gate_up.shape[0])
        return run_plain(self, hidden_states, gate_up, down, routing, activation)


def run_plain(
    backend: MoeBackend,
    x_TD: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    activation: Activation = "silu",
) -> torch.Tensor:
    """begin, one wave with slot = expert, finish. Raises ValueError with the reason if the backend can't."""
    shape = ExpertShape(model_dim=down.shape[1], hidden_dim=down.shape[2])
    slab = Slab.of_tensors(DTYPE_NAMES[gate_up.dtype], shape, {"gate_up": gate_up, "down": down})
    problem = Problem(
        num_tokens=x_TD.shape[0],
        top_k=routing.ids_TK.shape[1],
        num_slots=slab.num_slots,
        shape=shape,
        format=slab.format,
        dtype=x_TD.dtype,
        activation=activation,
    )
    if reason := backend.supports(problem, x_TD.device):
        raise ValueError(f"the {backend.name} backend can't compute this: {reason}")
    step = backend.begin(x_TD, routing, problem)
    step.run(Placement(slab, routing.ids_TK))
    return step.finish()


def _check_tensors(x_TD: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    if x_TD.ndim != 2 or gate_up.ndim != 3 or down.ndim != 3:
        raise ValueError("expected hidden_states [T, D], gate_up [E, 2F, D] and down [E, D, F]")
    num_experts, model_dim, hidden_dim = down.shape
    if gate_up.shape != (num_experts, 2 * hidden_dim, model_dim):
        raise ValueError(
            f"gate_up must be [E, 2F, D] = {[num_experts, 2 * hidden_dim, model_dim]} "
            f"beside down {list(down.shape)}, not {list(gate_up.shape)}"
        )
    if x_TD.shape[1] != model_dim:
        raise ValueError(f"hidden_states must be [T, {model_dim}] for these experts, not {list(x_TD.shape)}")
    for name, tensor in (("hidden_states", x_TD), ("gate_up", gate_up), ("down", down)):
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} must be bfloat16, float16 or float32, not {tensor.dtype}")
        if tensor.device != x_TD.device:
            raise ValueError(
                f"{name} is on {tensor.device}, hidden_states on {x_TD.device}: move one of them"
            )
    if gate_up.dtype != down.dtype:
        raise ValueError(f"gate_up is {gate_up.dtype} but down is {down.dtype}: store both in one dtype")


def _checked_routing(ids: torch.Tensor, weights: torch.Tensor, num_tokens: int, num_experts: int) -> Routing:
    if ids.ndim != 2 or ids.shape[0] != num_tokens or ids.shape != weights.shape:
        raise ValueError(
            f"topk_ids and topk_weights must both be [{num_tokens}, K], "
            f"not {list(ids.shape)} and {list(weights.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, not {ids.dtype}")
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_experts:
        raise ValueError(
            f"topk_ids hold {int(ids.min())}..{int(ids.max())}; "
            f"allowed are 0..{num_experts - 1} and -1 for no expert"
        )
    return Routing(ids.int(), weights.float())
