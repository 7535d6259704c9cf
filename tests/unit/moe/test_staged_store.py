"""The staged store: bit for bit the resident store, however few slots, whatever happened before, however late the copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, Routing, RoutingRule
from minisgl.moe.formats import get_format, moe_quantization_choices
from minisgl.moe.store import CacheCounters, ResidentStore, StagedStore, StoreBytes
from minisgl.moe.store.copies import DirectCopies
from minisgl.moe.store.pinned import HostMemory
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.unit.moe.late_copies import LateCopies

E, K, D, F = 16, 4, 32, 64
SHAPE, BACKEND = ExpertShape(D, F), TorchMoeBackend()


def make_pair(
    name: str = "none", num_slots: int = 6, wave_size: int = 8, late: bool = True
) -> tuple[MoELayer, MoELayer]:
    """(resident, staged) around the same router and weights."""
    weight_format = get_format(name, torch.float32, group_size=32)
    resident = ResidentStore(E, SHAPE, weight_format, "cpu")
    host = HostMemory().allocate(E, weight_format.bytes_per_expert(SHAPE))
    copies = LateCopies if late else DirectCopies
    staged = StagedStore(host, SHAPE, weight_format, num_slots, "cpu", copies, wave_size)
    router = Router(E, D, RoutingRule(K))
    router.weight.normal_()
    for store in (resident, staged):
        store.fill_random(seed=0, std=0.15)
    return MoELayer(router, resident, BACKEND), MoELayer(router, staged, BACKEND)


def store_of(layer: MoELayer) -> StagedStore:
    assert isinstance(layer.store, StagedStore)
    return layer.store


@pytest.mark.parametrize("name", moe_quantization_choices)
@pytest.mark.parametrize("num_slots", [1, 3, E])
def test_equal_to_resident_in_every_format(name: str, num_slots: int) -> None:
    resident, staged = make_pair(name, num_slots)
    for num_tokens in (1, 7, 1, 64, 2, 1, 0):
        x = torch.randn(num_tokens, D)
        assert torch.equal(staged(x), resident(x))
        some = torch.tensor([num_tokens // 2], dtype=torch.int32)
        assert torch.equal(staged(x, some), resident(x, some)), "padding rows"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equal_to_resident_after_any_history(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, E), "slots")
    resident, staged = make_pair(num_slots=num_slots, wave_size=data.draw(st.integers(1, 20), "wave size"))
    for num_tokens in data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 8, 64]), max_size=8), "tokens"):
        x = torch.randn(num_tokens, D)
        assert torch.equal(staged(x), resident(x))
        store_of(staged)._table.check()
    store = store_of(staged)
    assert store._table.num_slots - store._table.expert_of_S.count(-1) == min(
        num_slots, store.counters().misses
    )


def test_a_step_that_ends_in_the_middle_leaves_a_true_table() -> None:
    resident, staged = make_pair(num_slots=6, wave_size=2)
    store, x = store_of(staged), torch.randn(5, D)
    for num_waves in (0, 1, 2, 3):
        routing = BACKEND.route(staged.router(x), staged.router.rule)
        waves = iter(store.place(routing))
        for _ in range(num_waves):
            next(waves)
        waves.close()
        store._table.check()
        x = torch.randn(3, D)
        assert torch.equal(staged(x), resident(x))


def test_missing_experts_travel_while_others_compute() -> None:
    """The copies of a wave start before the wave ahead of it is handed out, where slots allow it."""
    _, staged = make_pair(num_slots=8, wave_size=2)
    store = store_of(staged)
    log = store._copies.log
    first = Routing(torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.ones(1, 4))
    list(store.place(first))
    log.clear()
    for _ in store.place(Routing(torch.tensor([[0, 4, 1, 5]], dtype=torch.int32), torch.ones(1, 4))):
        log.append(("compute", -1))
    kinds = [kind for kind, _ in log]
    hits, misses = kinds.index("compute"), len(kinds) - 1 - kinds[::-1].index("compute")
    assert kinds[:hits].count("start") == 2, (
        "the missing ones are on their way before the resident ones compute"
    )
    assert kinds[hits:misses].count("wait") == 2, "and are waited for only afterwards"


def test_routes_of_a_wave_and_their_number() -> None:
    _, staged = make_pair(num_slots=3, wave_size=2)
    routing = Routing(torch.tensor([[0, 1, 2, -1], [2, 3, 4, 5]], dtype=torch.int32), torch.ones(2, 4))
    served = torch.zeros(2, 4, dtype=torch.int32)
    for placement in store_of(staged).place(routing):
        here = placement.slots_TK >= 0
        assert placement.slots_TK.dtype == torch.int32
        assert len(routing.ids_TK[here].unique()) <= 2
        served += here
    assert torch.equal(served, (routing.ids_TK >= 0).int())


def test_counters_and_what_stays() -> None:
    """The experts of a prompt's last tokens stay, and the cache counts an expert once a step."""
    _, staged = make_pair(num_slots=4)
    store = store_of(staged)

    def step(*rows: list[int]) -> CacheCounters:
        before = store.counters()
        list(store.place(Routing(torch.tensor(rows, dtype=torch.int32), torch.ones(len(rows), K))))
        return store.counters() - before

    nbytes = store.layout.nbytes
    assert step([0, 1, 2, 3], [0, 1, 2, 3]) == CacheCounters(0, 4, 0, 4 * nbytes)
    assert step([0, 1, 2, 3]) == CacheCounters(4, 0, 0, 0)
    assert step([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]) == CacheCounters(4, 8, 8, 8 * nbytes)
    assert step([8, 9, 10, 11]).hit_rate == 1.0
    assert step([8, 9, -1, -1]).hits == 2
    assert step([12, 13, -1, -1]) == CacheCounters(0, 2, 2, 2 * nbytes), "10 and 11 were used longest ago"
    assert step([8, 9, 12, 13]).misses == 0


def test_among_equals_the_rarely_used_expert_goes() -> None:
    _, staged = make_pair(num_slots=4)
    store = store_of(staged)
    for row in ([0, 1, 2, -1], [0, 2, -1, -1], [0, 1, 2, 3], [4, -1, -1, -1]):
        list(store.place(Routing(torch.tensor([row], dtype=torch.int32), torch.ones(1, K))))
    assert 3 not in store._table.expert_of_S
    assert {0, 1, 2, 4} == set(store._table.expert_of_S)


def test_records_are_the_only_copy_and_bytes_say_so() -> None:
    _, staged = make_pair("fp8", num_slots=5, late=False)
    store = store_of(staged)
    nbytes = store.format.bytes_per_expert(SHAPE)
    assert store.bytes() == StoreBytes(device=5 * nbytes, pinned=0, host=E * nbytes)
    assert store.records_EB.data_ptr() == store.parts["gate_up"].data_ptr()
    assert not store.graph_safe(1)
    assert store.num_slots == 5
    assert store.missing() == []


def test_pinned_records_are_not_staged() -> None:
    seen: dict[int, bool] = {}

    class Seeing(DirectCopies):
        def start(self, slot: int, records_NB: torch.Tensor, pinned: bool) -> None:
            seen[(records_NB.data_ptr() - store.records_EB.data_ptr()) // store.layout.nbytes] = pinned
            super().start(slot, records_NB, pinned)

    weight_format = get_format("none", torch.float32)
    host = HostMemory().allocate(E, weight_format.bytes_per_expert(SHAPE))
    partly = type(host)(host.records_EB, num_pinned=5)
    store = StagedStore(partly, SHAPE, weight_format, 4, "cpu", Seeing)
    list(store.place(Routing(torch.arange(E, dtype=torch.int32).view(4, 4), torch.ones(4, 4))))
    assert seen == {expert: expert < 5 for expert in range(E)}
    assert store.bytes().pinned == 5 * store.layout.nbytes
