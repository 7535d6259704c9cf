"""The MoE layer over ranks equals the layer on one: every dispatch, placement, replica set and odd shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, Problem, Routing, RoutingRule
from minisgl.moe.exchange import AllToAll, Exchange, Local, Rows, make_exchange
from minisgl.moe.formats import get_format
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.shard import ExpertShard, ExpertSpread
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.parallel import SOLO, Group, Shard
from tests.unit.parallel.threads import ThreadGroup, on_ranks

CPU = torch.device("cpu")
E, D, F, K = 8, 16, 12, 3
MODES = ["reduce", "dynamic", "dynamic without overlap", "static", "static without overlap"]
BACKEND = TorchMoeBackend()


def make_mode(mode: str, spread: ExpertSpread, group: Group) -> Exchange:
    name, _, rest = mode.partition(" ")
    return make_exchange(name, spread, group, CPU, overlap=not rest)


@dataclass(frozen=True)
class Weights:
    """All experts of a layer, and what they make of rows."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def random(cls) -> Weights:
        generator = torch.Generator().manual_seed(1)
        return cls(
            torch.randn(E, 2 * F, D, generator=generator) * 0.3,
            torch.randn(E, D, F, generator=generator) * 0.3,
        )

    def store(self, experts: tuple[int, ...]) -> ResidentStore:
        store = ResidentStore(len(experts), ExpertShape(D, F), get_format("none", torch.float32), CPU)
        store.sink(None, "gate_up", self.gate_up[list(experts)])
        store.sink(None, "down", self.down[list(experts)])
        return store


WEIGHTS = Weights.random()


def run_rows(store: ResidentStore, rows: Rows) -> torch.Tensor:
    problem = Problem(len(rows.x_RD), K, store.num_experts, store.shape, "fp32", torch.float32)
    step = BACKEND.begin(rows.x_RD, rows.routing, problem)
    for placement in store.place(rows.routing):
        step.run(placement)
    return step.finish()


def run_exchange(
    exchange: Exchange, store: ResidentStore, x_TD: torch.Tensor, routing: Routing
) -> torch.Tensor:
    before = x_TD.clone()
    sent = exchange.dispatch(x_TD, routing)
    y_TD = exchange.combine([run_rows(store, rows) for rows in sent.parts], sent)
    assert torch.equal(x_TD, before), "the input is left alone"
    return y_TD


def oracle(x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Float64, one route after the other."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t, k in (routing.ids_TK >= 0).nonzero().tolist():
        expert = int(routing.ids_TK[t, k])
        gate, up = (WEIGHTS.gate_up[expert].double() @ x_TD[t].double()).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        y_TD[t] += routing.weights_TK[t, k].double() * (WEIGHTS.down[expert].double() @ hidden)
    return y_TD


def make_routing(num_tokens: int, choose: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Routing:
    scores = torch.rand(num_tokens, E)
    ids_TK = scores.topk(K, dim=1).indices.int() if choose is None else choose(scores)
    return Routing(ids_TK, torch.rand(num_tokens, K))


def check(mode: str, spread: ExpertSpread, x_TD: torch.Tensor, routing: Routing) -> list[ThreadGroup]:
    groups: list[ThreadGroup] = []

    def work(group: ThreadGroup) -> torch.Tensor:
        groups.append(group)
        store = WEIGHTS.store(spread.experts_of(group.rank))
        return run_exchange(make_mode(mode, spread, group), store, x_TD, routing)

    outputs = on_ranks(spread.num_ranks, work)
    for y_TD in outputs:
        assert torch.equal(y_TD, outputs[0]), "all ranks hold the same bits"
        torch.testing.assert_close(y_TD.double(), oracle(x_TD, routing), atol=1e-5, rtol=1e-5)
    return groups


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["contiguous", "round-robin"])
@pytest.mark.parametrize("replicated", [(), (3,), (7, 0, 2), tuple(range(E))])
def test_sum_over_ranks_equals_one_rank(mode: str, size: int, kind: str, replicated: tuple[int, ...]) -> None:
    spread = ExpertSpread(E, size, kind, replicated)  # type: ignore[arg-type]
    for num_tokens in (0, 1, 3, 9):
        check(mode, spread, torch.randn(num_tokens, D), make_routing(num_tokens))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["padding", "no route", "one expert", "last expert", "one rank"])
def test_extreme_routings(mode: str, case: str) -> None:
    """-1 rows, no route at all, everything to one expert or one rank."""

    def choose(scores: torch.Tensor) -> torch.Tensor:
        ids = scores.topk(K, dim=1).indices.int()
        if case == "padding":
            ids[1], ids[3, 1], ids[6:] = -1, -1, -1
        if case == "no route":
            ids[:] = -1
        if case in ("one expert", "last expert"):
            ids[:] = torch.tensor([0 if case == "one expert" else E - 1, -1, -1])
        if case == "one rank":
            ids[:] = torch.tensor([1, 0, -1])
        return ids

    for spread in (ExpertSpread(E, 4), ExpertSpread(E, 2, "round-robin", (E - 1,))):
        check(mode, spread, torch.randn(9, D), make_routing(9, choose))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_spread_and_any_routing(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4]))
    replicated = data.draw(st.lists(st.integers(0, E - 1), unique=True, max_size=E))
    kind = data.draw(st.sampled_from(["contiguous", "round-robin"]))
    num_tokens = data.draw(st.integers(0, 9))
    row = st.lists(st.integers(-1, E - 1), min_size=K, max_size=K)
    ids = torch.tensor(data.draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))).reshape(-1, K)
    routing = Routing(ids.int(), torch.rand(num_tokens, K))
    mode = data.draw(st.sampled_from(MODES))
    check(mode, ExpertSpread(E, size, kind, tuple(replicated)), torch.randn(num_tokens, D), routing)


def test_dynamic_sends_a_token_once_a_rank_and_replicas_stay_home() -> None:
    x_TD = torch.randn(8, D)
    routing = make_routing(8, lambda s: torch.tensor([[4, 5, 6]] * 8).int())  # three experts, all of rank 1
    groups = {g.rank: g for g in check("dynamic", ExpertSpread(E, 2), x_TD, routing)}
    rows, metadata_and_rows_and_back = 4, 3
    assert groups[0].sent_rows == [rows, rows, 0] and len(groups[0].sent_rows) == metadata_and_rows_and_back
    assert groups[1].sent_rows == [0, 0, rows], "rank 1 sends back what it computed, and nothing else"
    groups = {g.rank: g for g in check("dynamic", ExpertSpread(E, 2, replicated=(4, 5, 6)), x_TD, routing)}
    assert groups[0].sent_rows == groups[1].sent_rows == [0, 0, 0]


@pytest.mark.parametrize("static", [True, False])
def test_tokens_that_are_not_replicated(static: bool) -> None:
    """Data-parallel attention: each rank has tokens of its own (and another number of them, where counts are exact)."""
    spread = ExpertSpread(E, 4, replicated=(5,))
    counts = [5, 5, 5, 5] if static else [5, 0, 1, 7]
    inputs = [(torch.randn(n, D), make_routing(n)) for n in counts]

    def work(group: ThreadGroup) -> torch.Tensor:
        exchange = AllToAll(spread, group, CPU, static=static, replicated=False)
        return run_exchange(exchange, WEIGHTS.store(spread.experts_of(group.rank)), *inputs[group.rank])

    for y_TD, (x_TD, routing) in zip(on_ranks(4, work), inputs):
        torch.testing.assert_close(y_TD.double(), oracle(x_TD, routing), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicated", [True, False])
def test_most_rows_is_what_the_largest_part_has(mode: str, replicated: bool) -> None:
    """Every token to all ranks is the worst case; a static exchange always sends so many."""
    size, spread, name = 4, ExpertSpread(E, 4), mode.split()[0]
    routing = make_routing(9, lambda s: torch.tensor([[1, 3, 5], [7, 3, 5], [1, 7, 3]] * 3).int())
    every = make_routing(9, lambda s: torch.tensor([[2 * (r % 4), -1, -1] for r in range(9)]).int())

    def work(group: ThreadGroup) -> list[tuple[int, int]]:
        exchange = make_mode(mode, spread, group)
        if not replicated and name != "reduce":
            overlap = mode == name
            exchange = AllToAll(
                spread, group, CPU, static=name == "static", overlap=overlap, replicated=False
            )
        found, store = [], WEIGHTS.store(spread.experts_of(group.rank))
        for some in (routing, every):
            sent = exchange.dispatch(torch.randn(9, D), some)
            ys, rows = [], []
            for part in sent.parts:
                rows.append(len(part.x_RD))
                ys.append(run_rows(store, part))
            exchange.combine(ys, sent)
            found.append((max(rows), exchange.most_rows(9)))
        return found

    found = [pair for pairs in on_ranks(size, work) for pair in pairs]
    assert all(rows <= most for rows, most in found)
    assert name == "dynamic" or all(rows == most for rows, most in found)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_block", "int4", "int4_asym", "mxfp4"])
def test_experts_of_every_format_can_be_spread(name: str) -> None:
    """Whole experts keep their bits wherever they are, so the same sum comes out."""
    shape, rule = ExpertShape(64, 64), RoutingRule(top_k=K)
    weights = get_format(name, torch.float32, group_size=32)
    whole = ResidentStore(E, shape, weights, CPU)
    whole.fill_random(seed=1, std=0.2)
    router, x_TD = Router(E, 64, rule, device=CPU, dtype=torch.float32), torch.randn(9, 64)
    router.weight.normal_()
    expected = MoELayer(router, whole, BACKEND)(x_TD)
    assert expected.abs().max() > 0.1

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        spread, out = ExpertSpread(E, group.size, "round-robin", (5,)), []
        experts = spread.experts_of(group.rank)
        store = ResidentStore(len(experts), shape, weights, CPU)
        store.records_EB.copy_(whole.records_EB[list(experts)])
        for mode in MODES:
            out.append(MoELayer(router, store, BACKEND, exchange=make_mode(mode, spread, group))(x_TD))
        return out

    for outputs in on_ranks(4, work):
        for y_TD in outputs:
            torch.testing.assert_close(y_TD, expected, atol=1e-5, rtol=1e-5)


def test_one_rank_gives_the_bits_of_local() -> None:
    x_TD, routing, store = torch.randn(5, D), make_routing(5), WEIGHTS.store(tuple(range(E)))
    expected = run_exchange(Local(E), store, x_TD, routing)
    for mode in MODES:
        assert torch.equal(
            run_exchange(make_mode(mode, ExpertSpread(E, 1), SOLO), store, x_TD, routing), expected
        )


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_repeats_give_the_same_bits(mode: str) -> None:
    x_TD, routing, spread = torch.randn(33, D), make_routing(33), ExpertSpread(E, 4)

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        exchange, store = make_mode(mode, spread, group), WEIGHTS.store(spread.experts_of(group.rank))
        return [run_exchange(exchange, store, x_TD, routing) for _ in range(5)]

    assert len({y.numpy().tobytes() for outputs in on_ranks(4, work) for y in outputs}) == 1


def test_the_layer_with_router_and_padding_rows() -> None:
    """Through `MoELayer` itself, num_valid included, under expert parallelism and with each expert's F shared."""
    rule = RoutingRule(top_k=K)
    whole = MoELayer.from_tensors(torch.randn(E, D), WEIGHTS.gate_up, WEIGHTS.down, rule, BACKEND)
    x_TD, num_valid = torch.randn(7, D), torch.tensor([5], dtype=torch.int32)
    expected = whole(x_TD, num_valid)
    assert not expected[5:].any()

    def expert_parallel(group: ThreadGroup) -> torch.Tensor:
        spread = ExpertSpread(E, group.size, "round-robin")
        store = WEIGHTS.store(spread.experts_of(group.rank))
        layer = MoELayer(whole.router, store, BACKEND, exchange=make_mode("static", spread, group))
        return layer(x_TD, num_valid)

    def tensor_parallel(group: ThreadGroup) -> torch.Tensor:
        part = ExpertShard(E, tuple(range(E)), group.shard(F))
        store = ResidentStore(E, ExpertShape(D, part.hidden.length), get_format("none", torch.float32), CPU)
        for name, tensor in (("gate_up", WEIGHTS.gate_up), ("down", WEIGHTS.down)):
            cut = part.cut(name)
            assert cut is not None and tensor.shape[cut.dim + 1] == cut.total
            pieces = [tensor.narrow(cut.dim + 1, a, b - a) for a, b in cut.ranges]
            store.sink(None, name, torch.cat(pieces, cut.dim + 1))
        return MoELayer(whole.router, store, BACKEND, exchange=Local(E, group))(x_TD, num_valid)

    for work in (expert_parallel, tensor_parallel):
        for y_TD in on_ranks(4, work):
            torch.testing.assert_close(y_TD, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 3), "expert-parallel-size=3 does not divide the model's 8"),
        ((8, 2, "contiguous", (8,)), "expert 8, but there are 0..7"),
        ((8, 2, "contiguous", (-1,)), "expert -1"),
        ((8, 2, "contiguous", (3, 1, 3)), "twice"),
    ],
)
def test_what_cannot_be_spread_is_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExpertSpread(*arguments)


def test_every_expert_has_one_owner_and_local_numbers_are_dense() -> None:
    for kind in ("contiguous", "round-robin"):
        spread = ExpertSpread(12, 4, kind, (5, 2))
        held = [spread.experts_of(rank) for rank in range(4)]
        for expert in range(12):
            assert sum(expert in experts for experts in held) == (4 if expert in (5, 2) else 1)
        shard = spread.shard(1, F)
        assert [shard.local(expert) for expert in held[1]] == list(range(len(held[1])))
        assert [shard.is_elsewhere(e) for e in range(13)] == [e not in held[1] and e < 12 for e in range(13)]


def test_shards_cover_a_dimension_once() -> None:
    for total, count in ((8, 4), (7, 4), (3, 4), (272, 3)):
        shards = [Shard(total, index, count) for index in range(count)]
        assert [i for s in shards for i in range(s.start, s.stop)] == list(range(total))
        assert all(s.length <= s.width for s in shards)
