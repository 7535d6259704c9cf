"""The layer as a whole: any format, any store, any exchange, without the layer knowing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.moe import MoELayer, Router, SharedExpert
from minisgl.moe.base import ExpertShape, Placement, Problem, Routing, RoutingRule, Slab, select_experts
from minisgl.moe.exchange import Dispatched, Local, Rows
from minisgl.moe.formats import get_format, moe_quantization_choices
from minisgl.moe.store import ResidentStore, StoreBytes
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.torch_backend import TorchMoeBackend, TorchStep
from tests.moe_oracle import moe_oracle, random_case, relative_error

BACKEND = TorchMoeBackend()
each_format = pytest.mark.parametrize("name", moe_quantization_choices)


class TinySlabStore(ExpertRecords):
    """A store with fewer slots than experts: copies records into slots and serves a routing in several waves.

    What a cache does, without any cleverness. Slots are handed out in a shuffled order and start as NaN.
    """

    def __init__(self, num_slots: int, resident: ResidentStore) -> None:
        super().__init__(resident.num_experts, resident.shape, resident.format, "cpu")
        self.records_EB.copy_(resident.records_EB)
        self.device, self.num_slots, self.num_waves = resident.device, num_slots, 0
        slots = torch.full((num_slots, self.layout.nbytes), 0xFF, dtype=torch.uint8)
        self.slab = Slab.of_records(self.format.name, self.shape, self.layout, slots)

    def place(self, routing: Routing, awaits: bool = False, may_wait: bool = False) -> Iterable[Placement]:
        wanted = [expert for expert in routing.ids_TK.unique().tolist() if expert >= 0]
        for start in range(0, len(wanted), self.num_slots):
            slot_of_E = torch.full((self.num_experts + 1,), -1, dtype=torch.int32)  # the last answers id -1
            slots = torch.randperm(self.num_slots).tolist()
            for slot, expert in zip(slots, wanted[start : start + self.num_slots]):
                self.slab.records_SB[slot] = self.records_EB[expert]
                slot_of_E[expert] = slot
            self.num_waves += 1
            yield Placement(self.slab, slot_of_E[routing.ids_TK.long()])
            self.slab.records_SB.fill_(0xFF)  # a wave is valid only until the next is asked for

    def bytes(self) -> StoreBytes:
        return StoreBytes(device=self.slab.records_SB.nbytes, host=self.records_EB.nbytes)

    def graph_safe(self, num_tokens: int) -> bool:
        return False


class RankOf:
    """Exchange of one rank among several that all see the same tokens: its experts get local ids, others -1."""

    graph_safe = True

    def __init__(self, local_of_E: list[int]) -> None:
        self.local_of_E = torch.tensor([*local_of_E, -1], dtype=torch.int32)  # the last answers id -1
        self.num_experts = len(local_of_E)
        self.num_local_experts = max(local_of_E) + 1

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        local = Routing(self.local_of_E[routing.ids_TK.long()], routing.weights_TK)
        return Dispatched((Rows(x_TD, local),))

    def combine(self, ys: Sequence[torch.Tensor], sent: Dispatched) -> torch.Tensor:
        return ys[0]  # the test sums over ranks


def make_layer(
    name: str = "none",
    *,
    num_experts: int = 8,
    top_k: int = 2,
    dims: tuple[int, int] = (64, 96),
) -> MoELayer:
    weight_format = get_format(name, torch.float32, group_size=32)
    store = ResidentStore(num_experts, ExpertShape(*dims), weight_format, "cpu")
    store.fill_random(seed=0, std=0.15)
    router = Router(num_experts, dims[0], RoutingRule(top_k))
    router.weight.normal_()
    return MoELayer(router, store, BACKEND)


def expected(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    weights, ids = select_experts(F.linear(x, layer.router.weight), layer.router.rule.top_k, True)
    return moe_oracle(x, layer.gate_up, layer.down, ids, weights)


@each_format
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_layer_equals_the_oracle_in_every_format(name: str, num_tokens: int) -> None:
    layer, x = make_layer(name), torch.randn(num_tokens, 64)
    assert relative_error(layer(x), expected(layer, x)) < 1e-6
    layer, x = layer.bfloat16(), x.bfloat16()
    weights, ids = select_experts(layer.router(x), 2, True)
    exact = moe_oracle(x, layer.gate_up, layer.down, ids, weights)
    assert relative_error(layer(x), exact) < 3e-3  # one rounding, of the output


@pytest.mark.parametrize("hidden_dim", [80, 192, 320, 704])
def test_block_scales_of_odd_hidden_dims(hidden_dim: int) -> None:
    layer = make_layer("fp8_block", dims=(192, hidden_dim))
    for num_tokens in range(1, 10):
        x = torch.randn(num_tokens, 192)
        assert relative_error(layer(x), expected(layer, x)) < 1e-6


@each_format
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_waves_equal_one_wave_bit_for_bit(name: str, num_slots: int) -> None:
    resident, x = make_layer(name, num_experts=16, top_k=4), torch.randn(19, 64)
    assert isinstance(resident.store, ResidentStore)
    store = TinySlabStore(num_slots, resident.store)
    waves = MoELayer(resident.router, store, BACKEND)
    assert torch.equal(waves(x), resident(x))
    assert store.num_waves >= 16 // num_slots
    some = torch.tensor([5], dtype=torch.int32)
    assert torch.equal(waves(x, some), resident(x, some))
    assert torch.equal(waves(x[:0]), resident(x[:0]))


def test_kernels_are_chosen_as_if_all_experts_were_resident() -> None:
    problems = []

    class Recording(TorchMoeBackend):
        def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> TorchStep:
            problems.append(problem)
            return super().begin(x_TD, routing, problem)

    resident, x = make_layer("int8"), torch.randn(5, 64)
    assert isinstance(resident.store, ResidentStore)
    for store in (resident.store, TinySlabStore(2, resident.store)):
        MoELayer(resident.router, store, Recording())(x)
    shape = resident.store.shape
    assert problems == [Problem(5, 2, 8, shape, "int8", torch.float32, num_experts=8)] * 2


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_sum_over_ranks_is_the_whole(num_ranks: int) -> None:
    """Experts dealt to ranks in a random order, so that a global id used as a local one shows."""
    whole, x = make_layer(num_experts=16, top_k=2), torch.randn(12, 64)
    owner_of_E = torch.randperm(16) % num_ranks
    total = torch.zeros(12, 64)
    for rank in range(num_ranks):
        owned = (owner_of_E == rank).nonzero().flatten().tolist()
        local_of_E = [owned.index(expert) if expert in owned else -1 for expert in range(16)]
        store = ResidentStore(len(owned), whole.store.shape, whole.store.format, "cpu")
        store.sink(None, "gate_up", whole.gate_up[owned])
        store.sink(None, "down", whole.down[owned])
        total += MoELayer(whole.router, store, BACKEND, exchange=RankOf(local_of_E))(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-6)


def test_replicated_experts_serve_each_route_once() -> None:
    whole, x = make_layer(num_experts=4), torch.randn(10, 64)
    weights, ids = select_experts(whole.router(x), 2, True)
    even = (torch.arange(10) % 2 == 0)[:, None]
    first = ids.where((ids == 1) | ((ids == 0) & even), -1)  # experts 0 and 1, and of 0 the even tokens only
    second = ids.where((ids >= 2) | ((ids == 0) & ~even), -1)  # experts 0, 2 and 3
    parts = {"gate_up": whole.gate_up, "down": whole.down}
    total = torch.zeros(10, 64)
    for experts, routes in (([0, 1], first), ([0, 2, 3], second)):
        local = RankOf([experts.index(e) if e in experts else -1 for e in range(4)])
        (rows,) = local.dispatch(x, Routing(routes, weights)).parts
        slab = Slab.of_tensors("fp32", whole.store.shape, {name: t[experts] for name, t in parts.items()})
        problem = Problem(10, 2, len(experts), whole.store.shape, "fp32", torch.float32)
        step = BACKEND.begin(rows.x_RD, rows.routing, problem)
        step.run(Placement(slab, rows.routing.ids_TK))
        total += step.finish()
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-6)


def test_token_without_local_experts_gives_a_zero_row() -> None:
    whole, x = make_layer(num_experts=4), torch.randn(30, 64)
    store = ResidentStore(1, whole.store.shape, whole.store.format, "cpu")
    store.sink(None, "gate_up", whole.gate_up[2:3])
    store.sink(None, "down", whole.down[2:3])
    y = MoELayer(whole.router, store, BACKEND, exchange=RankOf([-1, -1, 0, -1]))(x)
    _, ids = select_experts(whole.router(x), 2, True)
    elsewhere = ~(ids == 2).any(dim=1)
    assert elsewhere.any()
    assert not y[elsewhere].any()
    assert y[~elsewhere].any(dim=1).all()


def test_padding_rows_use_no_expert() -> None:
    layer, x = make_layer(), torch.randn(8, 64)
    y = layer(x, torch.tensor([5], dtype=torch.int32))
    assert torch.equal(y[:5], layer(x[:5]))
    assert not y[5:].any()


def test_routing_parameters_reach_the_rule() -> None:
    layer = make_layer()
    rule = RoutingRule(2, "sigmoid", scaling_factor=2.0)
    router = Router(8, 64, rule, bias=True, choice_bias=True, dtype=torch.bfloat16)
    assert router.bias is not None
    assert router.choice_bias is not None
    assert {name: p.dtype for name, p in router.named_parameters()} == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
        "choice_bias": torch.float32,
    }
    router.float()
    router.weight.zero_()
    router.bias.copy_(torch.arange(8.0))
    router.choice_bias.copy_(torch.tensor([9.0, 8.0, 0, 0, 0, 0, 0, 0]))
    x = torch.randn(3, 64)
    ids, scores = torch.tensor([[0, 1]] * 3), torch.tensor([0.0, 1.0]).sigmoid()
    weights = (scores / scores.sum() * 2).expand(3, 2)
    y = MoELayer(router, layer.store, BACKEND)(x)
    assert relative_error(y, moe_oracle(x, layer.gate_up, layer.down, ids, weights)) < 1e-6


def test_shared_experts() -> None:
    mlp, x, alone = nn.Linear(64, 64, bias=False), torch.randn(5, 64), make_layer()
    plain, gated = SharedExpert(mlp), SharedExpert(mlp, gated=True, model_dim=64)
    assert gated.gate is not None
    gated.gate.normal_()
    with torch.no_grad():
        for shared, share in ((plain, torch.ones(5, 1)), (gated, torch.sigmoid(x @ gated.gate.T))):
            layer = MoELayer(alone.router, alone.store, BACKEND, shared=shared)
            torch.testing.assert_close(layer(x), alone(x) + share * mlp(x))


def test_plain_tensors_make_a_layer() -> None:
    case = random_case(7, 2, 4, 32, 48)
    router_weight = torch.randn(4, 32)
    layer = MoELayer.from_tensors(router_weight, case.gate_up, case.down, RoutingRule(2), BACKEND)
    assert torch.equal(layer.gate_up, case.gate_up)
    assert torch.equal(layer.down, case.down)
    y = BACKEND.forward(case.x, case.gate_up, case.down, F.linear(case.x, router_weight), 2, True)
    assert torch.equal(layer(case.x), y)


def test_parameters_may_be_on_meta() -> None:
    layer = make_layer()
    router = Router(8, 64, RoutingRule(2), device="meta", dtype=torch.bfloat16)
    empty = MoELayer(router, layer.store, BACKEND)
    assert [(name, p.device.type) for name, p in empty.named_parameters()] == [("router.weight", "meta")]


def test_parts_that_do_not_fit() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="router names 4 experts and the store holds 8"):
        MoELayer(Router(4, 64, RoutingRule(2)), layer.store, BACKEND)
    with pytest.raises(ValueError, match="exchange connects 9 and 9"):
        MoELayer(layer.router, layer.store, BACKEND, exchange=Local(9))


def test_backend_that_cannot_serve_says_so() -> None:
    class Refusing(TorchMoeBackend):
        name = "refusing"

        def supports(self, problem: Problem, device: torch.device) -> str | None:
            return f"no {problem.format} kernels for {device.type}"

    layer = make_layer("int8")
    with pytest.raises(ValueError, match="refusing backend can't serve this layer: no int8 kernels for cpu"):
        MoELayer(layer.router, layer.store, Refusing())


def test_input_is_left_alone_and_output_is_fresh() -> None:
    layer, x = make_layer(), torch.randn(6, 64)
    before, y = x.clone(), layer(x)
    kept = y.clone()
    layer(torch.randn(9, 64))
    assert torch.equal(x, before)
    assert torch.equal(y, kept)
