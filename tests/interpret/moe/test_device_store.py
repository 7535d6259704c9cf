"""The device store with its kernels in the interpreter: bit for bit the resident store, whatever the slots held before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.backend import MoeBackend
from minisgl.moe.base import ExpertShape, Placement, Routing, RoutingRule, Slab
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, Tiles
from minisgl.moe.store import CacheCounters, ExpertStore, ResidentStore, StagedStore
from minisgl.moe.store import device_cache as device_cache_module
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.overlap import Serial
from minisgl.moe.store.pinned import HostMemory
from minisgl.moe.store.streaming import TransientSlots
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.unit.moe.late_copies import LateCopies

E, K, D, F = 16, 4, 32, 64
SHAPE = ExpertShape(D, F)


WAYS = ["passing", "streaming"]


def serve_prompts(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Whether a prompt is planned by the device, or by the host, whatever would be faster."""
    monkeypatch.setattr(device_cache_module, "passes", lambda *_, **__: way == "passing")


def make_stores(
    num_slots: int, num_layers: int = 1, num_transient: int = 4, in_turn: bool = False
) -> list[DeviceStore]:
    """One a layer, linked as an engine links them; transient slots whose copies are late."""
    weight_format = get_format("none", torch.float32)
    shared: list[TransientSlots] = []

    def transient(slab: Slab) -> TransientSlots:
        if not shared:
            shared.append(TransientSlots(slab, num_transient, LateCopies))
        return shared[0]

    stores = []
    for layer in range(num_layers):
        host = HostMemory().allocate(E, weight_format.bytes_per_expert(SHAPE))
        overlap = Serial(in_turn=in_turn)
        store = DeviceStore(host, SHAPE, weight_format, num_slots, K, "cpu", transient, overlap)
        store.slab.records_SB.fill_(0xFF)
        store.fill_random(seed=layer, std=0.15)
        stores.append(store)
    for one, following in pairwise(stores):
        one.following = following
    return stores


def layer_of(store: ExpertStore, router: Router, backend: MoeBackend) -> MoELayer:
    return MoELayer(router, store, backend)


def random_router() -> Router:
    router = Router(E, D, RoutingRule(K))
    router.weight.normal_()
    return router


def resident_twin(store: DeviceStore) -> ResidentStore:
    resident = ResidentStore(E, SHAPE, store.format, "cpu")
    resident.records_EB.copy_(store.records_EB)
    return resident


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_equal_to_resident_after_any_history(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, E), "slots")
    num_transient = data.draw(st.integers(1, 8), "transient slots")
    (store,) = make_stores(num_slots, num_transient=num_transient)
    router, backend = random_router(), TorchMoeBackend()
    resident = layer_of(resident_twin(store), router, backend)
    cached = layer_of(store, router, backend)
    steps = st.tuples(st.sampled_from([0, 1, 1, 2, 3, 70]), st.sampled_from(WAYS))
    for num_tokens, way in data.draw(st.lists(steps, max_size=6), "tokens and ways"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            serve_prompts(monkeypatch, way)
            x = torch.randn(num_tokens, D)
            assert torch.equal(cached(x), resident(x))
            some = torch.tensor([num_tokens // 2], dtype=torch.int32)
            assert torch.equal(cached(x, some), resident(x, some)), "padding rows"


@pytest.mark.parametrize("num_slots", [1, 5, E])
@pytest.mark.parametrize("kind", ["device", "staged"])
def test_fused_kernels_give_the_same_bits(num_slots: int, kind: str) -> None:
    """Direct kernels for one token, which add up in registers when resident; grouped ones for more."""
    (store,) = make_stores(num_slots)
    router, resident = random_router(), resident_twin(store)
    other: ExpertStore = store
    if kind == "staged":
        host = HostMemory().allocate(E, store.layout.nbytes)
        other = StagedStore(host, SHAPE, store.format, num_slots, "cpu", LateCopies, wave_size=2)
        other.records_EB.copy_(store.records_EB)
    one, two = (layer_of(s, router, FusedMoeBackend()) for s in (resident, other))
    for num_tokens in (1, 1, 3):
        x = torch.randn(num_tokens, D)
        assert torch.equal(one(x), two(x))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_kernels_that_wait_for_records_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wave for hits and misses, whose kernels count what has come; padding rows, and steps that others plan."""
    shape, num_experts, top_k = ExpertShape(64, 32), 8, 3
    weight_format = get_format(name, torch.float16, group_size=32)
    host = HostMemory().allocate(num_experts, weight_format.bytes_per_expert(shape))
    overlap = Serial(in_turn=True)
    store = DeviceStore(
        host, shape, weight_format, 7, top_k, "cpu", lambda slab: TransientSlots(slab, 2, LateCopies), overlap
    )
    store.slab.records_SB.fill_(0xFF)
    store.fill_random(seed=0, std=0.15)
    twin = ResidentStore(num_experts, shape, weight_format, "cpu")
    twin.records_EB.copy_(store.records_EB)
    router = Router(num_experts, 64, RoutingRule(top_k), dtype=torch.float16)
    router.weight.normal_()
    words = Choice("direct", 1, Tiles(16, 64, 1), Tiles(32, 32, 1))
    backends = [FusedMoeBackend(records=lambda problem, limits: {1: words, 2: words}) for _ in range(2)]
    one, two = (MoELayer(router, s, backend) for s, backend in zip((twin, store), backends))
    joint = []

    def place(*args: Any) -> Iterator[Placement]:
        for placement in DeviceStore.place(store, *args):
            joint.append(placement.arrival is not None)
            yield placement

    monkeypatch.setattr(store, "place", place)
    for num_tokens in (1, 1, 2, 5):
        x = torch.randn(num_tokens, 64, dtype=torch.float16)
        assert torch.equal(one(x), two(x))
        some = torch.tensor([num_tokens // 2], dtype=torch.int32)
        assert torch.equal(one(x, some), two(x, some)), "padding rows"
    assert joint[:6] == [True] * 6 and not any(joint[6:]), (
        "five tokens may use more experts than there are slots"
    )


def ids(*rows: list[int]) -> Routing:
    return Routing(torch.tensor(rows, dtype=torch.int32), torch.ones(len(rows), len(rows[0])))


def test_decode_steps_are_counted_and_planned_by_the_device() -> None:
    (store,) = make_stores(num_slots=6)
    nbytes = store.layout.nbytes
    assert len(list(store.place(ids([0, 1, 2, 3])))) == 2, "hits, then misses"
    list(store.place(ids([0, 1, 4, 5])))
    list(store.place(ids([6, 0, -1, -1])))
    assert store.counters() == CacheCounters(hits=3, misses=7, evictions=1, num_bytes=7 * nbytes)
    assert set(store.plan.expert_of_S.tolist()) == {0, 1, 4, 5, 6, 3}, (
        "2 and 3 were used longest ago, equally often"
    )
    assert [store.graph_safe(n) for n in (1, 3, 6, 64, 65)] == [True, True, True, True, False]
    assert not make_stores(num_slots=3)[0].graph_safe(64), "sixteen experts through three slots"
    assert len(list(store.place(ids([0, 1, 2, 3], [4, 5, 6, 7])))) == 3, "eight experts through six slots"


def prompt(*last: int) -> Routing:
    """70 tokens that use experts 0 to 11 in turn, and then four more."""
    return ids(*[[t % 12, (t + 1) % 12, (t + 2) % 12, -1] for t in range(70)], list(last))


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_leaves_the_decode_set_alone_but_for_its_end(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_prompts(monkeypatch, way)
    monkeypatch.setattr(device_cache_module, "WARM_TOKENS", 1)
    (store,) = make_stores(num_slots=10)
    for row in ([12, 13, 14, 15], [12, 13, 14, 15], [0, 1, 12, 13]):
        list(store.place(ids(row)))
    before = store.counters()
    list(store.place(prompt(2, 3, 12, -1)))
    assert {0, 1, 12, 13, 14, 15, 2, 3} == set(store.plan.expert_of_S.tolist()) - {-1}
    done = store.counters() - before
    assert (done.hits, done.misses) == (3, 10), "0, 1 and 12 were there"
    assert done.num_bytes == 10 * store.layout.nbytes, "what was kept was copied on the device"
    before = store.counters()
    list(store.place(ids([2, 3, 12, 13])))
    assert (store.counters() - before).misses == 0
    assert all(torch.equal(store.slab.records_SB[s], store.records_EB[e])
               for s, e in enumerate(store.plan.expert_of_S.tolist()) if e >= 0)  # fmt: skip


def test_the_next_layer_streams_behind_a_layer_that_needed_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_prompts(monkeypatch, "streaming")
    first, second = make_stores(num_slots=2, num_layers=2, num_transient=6)
    everything = ids(*[[t % E, (t + 5) % E, (t + 9) % E, (t + 13) % E] for t in range(70)])
    list(first.place(everything))
    assert first.num_streamed == E
    assert second.num_streamed == 6, "as many as there are transient slots"
    list(second.place(everything))
    assert second.num_streamed == E, "what was on its way is not sent again"
    list(first.place(prompt(0, 1, 2, 3)))
    before = second.num_streamed
    list(second.place(ids([0, 1, 2, 3])))
    assert second.num_streamed == before, "a prompt of few experts sends nothing ahead"


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_fetches_only_what_it_uses(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_prompts(monkeypatch, way)
    (store,) = make_stores(num_slots=1)
    list(store.place(ids(*[[2, 3, -1, -1]] * 70)))
    assert store.counters().num_bytes == 2 * store.layout.nbytes


@pytest.mark.parametrize("num_slots", [1, 5, 11])
def test_whoever_plans_a_prompt_leaves_the_same_cache(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between decode steps; and it counts the same, but for what the host has sent ahead in vain."""
    pairs = [make_stores(num_slots, num_layers=2, num_transient=6) for _ in range(2)]
    for num_tokens in (1, 70, 3, 1, 9, 200, 2):
        routing = ids(*torch.stack([torch.randperm(E)[:K] for _ in range(num_tokens)]).tolist())
        for way, stores in zip(WAYS, pairs):
            serve_prompts(monkeypatch, way)
            for store in stores:
                list(store.place(routing, may_wait=True))
        for passing, streaming in zip(*pairs):
            for name in ("slot_of_E", "expert_of_S", "last_use_E", "uses_E", "clock"):
                assert torch.equal(getattr(passing.plan, name), getattr(streaming.plan, name)), name
            one, two = passing.counters(), streaming.counters()
            assert (one.hits, one.misses, one.evictions) == (two.hits, two.misses, two.evictions)
            assert one.num_bytes == one.misses * passing.layout.nbytes <= two.num_bytes
            for slot, expert in enumerate(passing.plan.expert_of_S.tolist()):
                assert expert < 0 or passing.slab.records_SB[slot].equal(passing.records_EB[expert])


def test_the_device_takes_slots_into_which_the_host_has_begun_to_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer that streams has sent the next one's experts ahead; then that step ends, and a short prompt follows."""
    stores = make_stores(num_slots=2, num_layers=2, num_transient=6)
    router, backend = random_router(), TorchMoeBackend()
    layers = [layer_of(store, router, backend) for store in stores]
    resident = [layer_of(resident_twin(store), router, backend) for store in stores]
    for way in ("streaming", "passing", "streaming"):
        serve_prompts(monkeypatch, "streaming")
        x = torch.randn(70, D)
        assert torch.equal(layers[0](x), resident[0](x))
        assert stores[1].num_streamed, "sent ahead"
        serve_prompts(monkeypatch, way)
        x = torch.randn(5, D)
        for cached, twin in zip(layers, resident):
            assert torch.equal(cached(x), twin(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [2, 70])
def test_a_step_that_ends_in_the_middle_leaves_true_slots(
    num_tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_prompts(monkeypatch, way)
    (store,) = make_stores(num_slots=5)
    router, backend = random_router(), TorchMoeBackend()
    resident = layer_of(resident_twin(store), router, backend)
    cached = layer_of(store, router, backend)
    for num_waves in range(5):
        routing = backend.route(router(torch.randn(num_tokens, D)), router.rule)
        waves = iter(store.place(routing))
        for _ in range(num_waves):
            next(waves, None)
        waves.close()  # type: ignore[attr-defined]
        for size in (1, 70):
            x = torch.randn(size, D)
            assert torch.equal(cached(x), resident(x))


@pytest.mark.parametrize("in_turn", [False, True])
def test_an_interrupt_between_plan_and_fetch_leaves_true_slots(
    in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook, after which the same model generates again."""
    (store,) = make_stores(num_slots=8, in_turn=in_turn)
    router, backend = random_router(), TorchMoeBackend()
    resident, cached = layer_of(resident_twin(store), router, backend), layer_of(store, router, backend)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    x = torch.randn(2, D)
    with monkeypatch.context() as patched:
        patched.setattr(store.plan, "_fetch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cached(x)
    assert torch.equal(cached(x), resident(x))


def test_bytes() -> None:
    (store,) = make_stores(num_slots=5)
    assert (store.bytes().device, store.bytes().pinned) == (5 * store.layout.nbytes, 0)
    assert store.bytes().host == E * store.layout.nbytes
