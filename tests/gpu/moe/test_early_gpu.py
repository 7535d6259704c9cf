"""Fetching on a guess, on CUDA: copies that are interrupted anywhere, inside a graph, and the bits of the resident store."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, RoutingRule
from minisgl.moe.formats import get_format
from minisgl.moe.store import CacheCounters, ResidentStore
from minisgl.moe.store.overlap import Forked
from minisgl.moe.store.pinned import GIB, CudaPinning, HostMemory

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.store.copies import CopyChannel, CudaCopies
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.streaming import TransientSlots

E, K, D, F = 24, 4, 1024, 512
SHAPE, CUDA = ExpertShape(D, F), torch.device("cuda")
LAYERS = 4


@pytest.fixture
def memory():
    host = HostMemory(CudaPinning(), 2 * GIB)
    yield host
    torch.cuda.synchronize()
    host.close()


def make_layers(memory: HostMemory, name: str, num_slots: int) -> list[tuple[MoELayer, MoELayer]]:
    """(resident, cached) layers whose routers are alike, so that many guesses are right."""
    weight_format = get_format(name, torch.bfloat16, group_size=32)
    nbytes = weight_format.bytes_per_expert(SHAPE)
    channel, overlap = CopyChannel(CUDA, memory, 0, nbytes), Forked(CUDA, prefetches=True)

    def transient(slab):
        return TransientSlots(slab, 6, lambda slots_SB: CudaCopies(channel, slots_SB))

    weight, pairs = torch.randn(E, D, device=CUDA), []
    for index in range(LAYERS):
        host = memory.allocate(E, nbytes)
        store = DeviceStore(host, SHAPE, weight_format, num_slots, K, CUDA, transient, overlap)
        store.fill_random(seed=index, std=0.03)
        store.slab.records_SB.fill_(0xFF)
        twin = ResidentStore(E, SHAPE, weight_format, CUDA)
        twin.records_EB.copy_(store.records_EB)
        router = Router(E, D, RoutingRule(K), device=CUDA, dtype=torch.bfloat16)
        router.weight.copy_(weight + 0.5 * torch.randn(E, D, device=CUDA))
        pairs.append((MoELayer(router, twin, FusedMoeBackend()), MoELayer(router, store, FusedMoeBackend())))
    for (_, one), (_, two) in pairwise(pairs):
        one.store.following = two.store
        one.guess_with(two)
    return pairs


def total(pairs: list[tuple[MoELayer, MoELayer]]) -> CacheCounters:
    return sum((cached.store.counters() for _, cached in pairs), CacheCounters())


@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4", "none"])
def test_equal_to_resident_however_much_came(memory: HostMemory, name: str) -> None:
    """Between layers the device waits for 0 to 100 us, so that copies stop anywhere; prompts come between the steps."""
    pairs = make_layers(memory, name, 7)
    for batch, cycles in ((1, 0), (1, 20_000), (2, 60_000), (1, 180_000), (4, 40_000)):
        x = torch.randn(batch, D, device=CUDA, dtype=torch.bfloat16)
        valid = torch.full((1,), batch, dtype=torch.int32, device=CUDA)

        def step(x=x, valid=valid, cycles=cycles) -> torch.Tensor:
            y = x
            for _, cached in pairs:
                y = y + 0.1 * cached(y, valid)
                torch.cuda._sleep(cycles)
            return y

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        for replay in range(25):
            if replay % 8 == 7:
                prompt = torch.randn(70, D, device=CUDA, dtype=torch.bfloat16)
                for resident, cached in pairs:
                    assert torch.equal(cached(prompt), resident(prompt))
            x.copy_(torch.randn(batch, D, device=CUDA))
            graph.replay()
            expected = x
            for resident, _ in pairs:
                expected = expected + 0.1 * resident(expected, valid)
            assert torch.equal(y, expected), f"{batch} tokens, {cycles} cycles, replay {replay}"
        torch.cuda.synchronize()
        partly = sum(int(cached.store.plan.counters[9]) for _, cached in pairs[1:])
        print(
            f"{name}, {batch} tokens, {cycles} cycles: {total(pairs)}, {partly} chunks of records that came in part"
        )
        for _, cached in pairs:
            places = cached.store.plan.place_of_E(*(part.tolist() for part in cached.store.plan.where()))
            for expert, place in enumerate(places):
                if place >= 0:
                    slot_B = cached.store.slab.records_SB[place].cpu()
                    assert torch.equal(slot_B, cached.store.records_EB[expert])
    counters = total(pairs)
    assert 0 < counters.useful_bytes <= counters.early_bytes
