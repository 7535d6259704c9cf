"""What benchmark/offload.py expects of a device store is what that fetches, in graphs and outside of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmark.offload_expected import expected_misses
from minisgl.moe.base import ExpertShape, Routing
from minisgl.moe.formats import get_format
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.pinned import HostMemory
from minisgl.moe.store.streaming import TransientSlots
from tests.unit.moe.late_copies import LateCopies

E, K = 16, 2


@pytest.mark.parametrize(("num_slots", "batch"), [(4, 1), (5, 3), (4, 12), (3, 8)])
def test_equal_to_the_store(num_slots: int, batch: int) -> None:
    """(4, 12) and (3, 8) would take more waves than a graph holds."""
    shape, weight_format = ExpertShape(8, 8), get_format("none", torch.float32)
    host = HostMemory().allocate(E, weight_format.bytes_per_expert(shape))
    store = DeviceStore(
        host, shape, weight_format, num_slots, K, "cpu", lambda slab: TransientSlots(slab, 4, LateCopies)
    )
    store.fill_random(seed=0, std=0.1)
    rng = np.random.default_rng(0)
    ids_NLTK = rng.permuted(np.tile(np.arange(E, dtype=np.int32), (12, 1, batch, 1)), axis=3)[..., :K]
    fetched = [0]
    for ids_TK in torch.from_numpy(np.ascontiguousarray(ids_NLTK[:, 0])):
        may_wait = not store.graph_safe(batch)
        for _ in store.place(Routing(ids_TK, torch.ones(ids_TK.shape)), may_wait=may_wait):
            pass
        counters = store.counters()
        assert counters is not None
        fetched.append(counters.misses)
    expected = expected_misses(ids_NLTK, E, num_slots, "device")[:, 0]
    assert np.diff(fetched).tolist() == expected.tolist()
    assert 0 < expected.sum() < ids_NLTK.size
