"""The expert map and the cache's numbers, from stores whose state is known and from a real offloaded engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.models.registry import DEMO_FOLDER
from minisgl.moe.store import CacheCounters, CacheView
from minisgl.server.engine_factory import ModelEngine
from minisgl.server.expert_watch import ExpertWatch
from minisgl.server.ipc import ExpertMap


def grids(found: ExpertMap | None) -> tuple[np.ndarray, np.ndarray]:
    assert found is not None
    shape = (found.num_layers, found.num_experts)
    return (
        np.frombuffer(found.heat, dtype=np.uint8).reshape(shape),
        np.frombuffer(found.resident, dtype=np.uint8).reshape(shape),
    )


def test_caches_give_heat_and_places_and_heat_fades() -> None:
    uses, slots = torch.tensor([[5, 0, 0], [0, 0, 7]]), torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    views = [lambda i=i: CacheView(uses[i], slots[i]) for i in range(2)]
    watch = ExpertWatch(views, [0, 2, 3], 4, None, dict)  # expert 1 belongs to another rank
    heat, resident = grids(watch.map())
    assert not heat.any(), "what was used before the first look is not news"
    assert resident.tolist() == [[1, 0, 1, 0], [0, 0, 1, 1]]
    uses += torch.tensor([[10, 0, 0], [0, 5, 0]])
    heat, _ = grids(watch.map())
    assert heat.tolist() == [[255, 0, 0, 0], [0, 0, 127, 0]]
    uses += torch.tensor([[0, 0, 8], [0, 0, 0]])
    heat, _ = grids(watch.map())
    assert heat[0].tolist() == [255, 0, 0, 255]
    assert heat[1, 2] == 127


def test_without_caches_and_trace_there_is_nothing_to_show() -> None:
    watch = ExpertWatch([lambda: None], [0, 1], 2, None, dict)
    assert watch.map() is None
    assert watch.numbers() == {}


def test_numbers_are_sums_over_layers() -> None:
    layers = {0: CacheCounters(1, 2, 3, 4, 5, 6), 5: CacheCounters(10, 20, 30, 40, 50, 60)}
    watch = ExpertWatch([], [0], 1, None, lambda: layers)
    assert watch.numbers() == {
        "expert_hits": 11,
        "expert_misses": 22,
        "expert_evictions": 33,
        "link_bytes": 44,
        "early_bytes": 55,
        "useful_bytes": 66,
    }


@pytest.mark.parametrize("offload", [False, True])
def test_a_real_engine_fills_them(offload: bool) -> None:
    options = {"moe_expert_offload": True, "moe_expert_cache_size": "6"} if offload else {}
    config = EngineConfig.from_kwargs(model="demo", device="cpu", num_pages=50, **options)
    parts = ModelEngine(config, str(Path(DEMO_FOLDER)))()
    before = parts.experts()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    parts.scheduler.add(Request("r", tuple(range(40, 60)), params))
    while parts.scheduler.has_work:
        parts.scheduler.step()
    numbers, (heat, resident) = parts.numbers(), grids(parts.experts())
    parts.close()
    assert heat.shape == (parts.facts.num_layers, parts.facts.num_experts)
    assert heat.any(axis=1).all(), "every layer used experts"
    assert not grids(before)[0].any()
    if offload:
        assert (resident.sum(axis=1) == 6).all()
        assert numbers["expert_misses"] >= resident.sum()
        assert numbers["link_bytes"] > 0
        assert numbers["expert_hits"] > 0
    else:
        assert resident.all()
        assert numbers == {}
