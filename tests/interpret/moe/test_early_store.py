"""Stores that fetch on a guess, kernels in the interpreter: bit for bit the resident layers, and numbers that add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, Routing, RoutingRule
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, Tiles
from minisgl.moe.store import CacheCounters, ResidentStore, device_cache
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.device_plan import CHUNK_BYTES
from minisgl.moe.store.overlap import Serial
from minisgl.moe.store.pinned import HostMemory
from minisgl.moe.store.streaming import TransientSlots
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.unit.moe.late_copies import LateCopies

E, K, D, F = 12, 3, 32, 64
SHAPE = ExpertShape(D, F)


class Interrupted(Serial):
    """A link that is idle for `most` chunks of a layer's list only."""

    def __init__(self, in_turn: bool = False) -> None:
        super().__init__(prefetches=True, in_turn=in_turn)
        self.most = 0

    def follow(self, prepare: Callable[[], None], fetch: Callable[[], None]) -> None:
        prepare()
        store = fetch.__self__  # type: ignore[attr-defined]
        store.plan.fetch_early(store.records_EB, store.slab.records_SB, self.most)


def make_layers(num_slots: int, num_layers: int, overlap: Serial) -> tuple[list[MoELayer], list[MoELayer]]:
    """(resident, cached), whose routers are alike, so that guesses are often right."""
    weight_format, backend = get_format("none", torch.float32), TorchMoeBackend()
    weight = torch.randn(E, D)
    resident, cached = [], []
    for index in range(num_layers):
        host = HostMemory().allocate(E, weight_format.bytes_per_expert(SHAPE))
        make_transient = partial(TransientSlots, num_slots=4, copies=LateCopies)
        store = DeviceStore(host, SHAPE, weight_format, num_slots, K, "cpu", make_transient, overlap)
        store.slab.records_SB.fill_(0xFF)
        store.fill_random(seed=index, std=0.1)
        router = Router(E, D, RoutingRule(K))
        router.weight.copy_(weight + torch.randn(E, D))
        twin = ResidentStore(E, SHAPE, weight_format, "cpu")
        twin.records_EB.copy_(store.records_EB)
        resident.append(MoELayer(router, twin, backend))
        cached.append(MoELayer(router, store, backend))
        if index:
            cached[-2].store.following = store
            cached[-2].guess_with(cached[-1])
    return resident, cached


def forward(layers: list[MoELayer], x_TD: torch.Tensor, num_valid: torch.Tensor | None) -> torch.Tensor:
    for layer in layers:
        x_TD = x_TD + 0.1 * layer(x_TD, num_valid)
    return x_TD


def total(layers: list[MoELayer]) -> CacheCounters:
    return sum((layer.store.counters() for layer in layers), CacheCounters())


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_equal_to_resident_whatever_comes_early(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    link = Interrupted()
    resident, cached = make_layers(data.draw(st.integers(1, E - 1), "slots"), 3, link)
    for num_tokens in data.draw(st.lists(st.sampled_from([1, 1, 2, 4, 5, 70]), max_size=8), "tokens"):
        link.most = data.draw(st.integers(0, 15), "chunks that come")
        x_TD = torch.randn(num_tokens, D)
        valid = torch.tensor([data.draw(st.integers(0, num_tokens), "valid")], dtype=torch.int32)
        assert torch.equal(forward(cached, x_TD, valid), forward(resident, x_TD, valid))


def test_a_cache_holds_what_it_would_hold_without_guesses() -> None:
    torch.manual_seed(0)
    _, plain = make_layers(5, 3, Serial())
    torch.manual_seed(0)
    _, early = make_layers(5, 3, Serial(prefetches=True))
    for _ in range(12):
        x_TD = torch.randn(1, D)
        assert torch.equal(forward(plain, x_TD, None), forward(early, x_TD, None))
        for one, two in zip(plain, early):
            assert one.store.plan.expert_of_S.tolist() == two.store.plan.expert_of_S.tolist()
    one, two = total(plain), total(early)
    assert two.evictions == one.evictions
    assert two.hits + two.misses == one.hits + one.misses
    assert 0 < two.useful_bytes < two.early_bytes
    assert two.misses < one.misses, "the link was idle for long enough to fetch whole experts"
    assert (one.early_bytes, one.early_off) == (0, 0)
    record = early[0].store.layout.nbytes
    whole = -(-record // CHUNK_BYTES) * CHUNK_BYTES
    assert two.num_bytes == two.misses * record + two.early_bytes, (
        "every record came whole, in time or in vain"
    )
    assert two.early_bytes % whole == 0


@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4"])
def test_kernels_that_wait_for_what_did_not_come_early(name: str) -> None:
    """Records of several chunks, of which any number came early; and steps that the other kernels plan in between."""
    shape, num_experts, top_k = ExpertShape(128, 32), 8, 3
    weight_format, link = get_format(name, torch.float16, group_size=32), Interrupted(in_turn=True)
    words = Choice("direct", 1, Tiles(16, 128, 1), Tiles(64, 32, 1))
    backend = FusedMoeBackend(records=lambda problem, limits: {1: words, 2: words})
    router = Router(num_experts, shape.model_dim, RoutingRule(top_k), dtype=torch.float16)
    router.weight.normal_()
    make_transient = partial(TransientSlots, num_slots=2, copies=LateCopies)
    resident, cached = [], []
    for index in range(2):
        host = HostMemory().allocate(num_experts, weight_format.bytes_per_expert(shape))
        store = DeviceStore(host, shape, weight_format, 6, top_k, "cpu", make_transient, link)
        store.slab.records_SB.fill_(0xFF)
        store.fill_random(seed=index, std=0.1)
        twin = ResidentStore(num_experts, shape, weight_format, "cpu")
        twin.records_EB.copy_(store.records_EB)
        resident.append(MoELayer(router, twin, backend))
        cached.append(MoELayer(router, store, backend))
        if index:
            cached[-2].store.following = store
            cached[-2].guess_with(cached[-1])
    in_turn = 0
    for num_tokens, most in ((1, 2), (2, 3), (1, 5), (5, 4), (1, 0), (2, 1), (1, 100)):
        link.most = most
        x_TD = torch.randn(num_tokens, shape.model_dim, dtype=torch.float16)
        valid = torch.tensor([num_tokens], dtype=torch.int32)
        assert torch.equal(forward(cached, x_TD, valid), forward(resident, x_TD, valid))
        in_turn += bool(cached[0].store.plan.told_3M.any())
    counters = total(cached)
    assert in_turn and 0 < counters.useful_bytes <= counters.early_bytes


def test_more_tokens_than_guesses_are_for() -> None:
    link = Serial(prefetches=True)
    _, cached = make_layers(6, 2, link)
    for num_tokens, expected in ((5, False), (70, False), (4, True)):
        forward(cached, torch.randn(num_tokens, D), torch.tensor([num_tokens], dtype=torch.int32))
        assert (total(cached).early_bytes > 0) == expected, f"{num_tokens} tokens"


@pytest.mark.parametrize("way", ["passing", "streaming"])
def test_a_prompt_fetches_whole_what_came_early(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end takes what came early into the cache; but the prompt's own copies know nothing of that, and all are counted."""
    monkeypatch.setattr(device_cache, "passes", lambda *_: way == "passing")
    torch.manual_seed(0)
    link = Interrupted()
    resident, cached = make_layers(5, 2, link)
    record = cached[0].store.layout.nbytes
    useful = 0
    for most in (1, 2, 5, 100):
        link.most = most
        x_TD = torch.randn(1, D)
        for _ in range(2):
            assert torch.equal(forward(cached, x_TD, None), forward(resident, x_TD, None))
        x_TD = torch.randn(70, D)
        cached[0](x_TD[-1:])  # guesses for a layer that the prompt's end is about to ask
        before = total(cached)
        assert torch.equal(cached[1](x_TD), resident[1](x_TD))
        done = total(cached) - before
        assert done.num_bytes == done.misses * record + done.early_bytes
        useful += done.useful_bytes
    assert useful > 0


@pytest.mark.parametrize("num_waves", [0, 1, 2])
def test_a_step_that_ends_in_the_middle(num_waves: int) -> None:
    """The following layer never begins: what came for it is there in the next step, or not, and no bit changes."""
    resident, cached = make_layers(5, 2, Serial(prefetches=True))
    for _ in range(4):
        x_TD = torch.randn(1, D)
        first = cached[0]
        first.store.expect(partial(first.guess, x_TD, None))
        ids_TK = first.backend.route(first.router(x_TD), first.router.rule).ids_TK
        waves = iter(first.store.place(Routing(ids_TK, torch.ones(ids_TK.shape))))
        for _ in range(num_waves):
            next(waves, None)
        waves.close()
        for size in (1, 70, 2):
            x_TD = torch.randn(size, D)
            assert torch.equal(forward(cached, x_TD, None), forward(resident, x_TD, None))


def test_early_slots_are_part_of_the_bytes() -> None:
    for num_slots, early in ((5, 2), (E - 1, 1)):
        _, (layer,) = make_layers(num_slots, 1, Serial(prefetches=True))
        record = layer.store.layout.nbytes
        assert layer.store.bytes().device == (num_slots + early) * record
        assert layer.store.num_slots <= E
