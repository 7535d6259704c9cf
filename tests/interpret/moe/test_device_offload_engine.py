"""The device store through the whole engine, its kernels in the interpreter: text and log-probabilities stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.engine import offload as offload_module
from minisgl.moe.store import device_cache
from minisgl.moe.store.device_cache import DeviceStore
from tests.e2e.model_factory import make_model, make_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)


@pytest.mark.parametrize(("prefetch", "passing"), [(False, True), (False, False), (True, True)])
def test_text_equals_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: bool, passing: bool
) -> None:
    """passing: whether the device plans prompts, too, rather than the host."""
    monkeypatch.setattr(device_cache, "passes", lambda *_: passing)
    monkeypatch.setattr(offload_module, "choose_mode", lambda *_: ("device", []))
    make_model(tmp_path, "qwen3_moe")
    options: dict[str, Any] = {"device": "cpu", "num_pages": 40, "moe_backend": "torch"}
    resident = LLM(str(tmp_path), **options)
    cached = LLM(
        str(tmp_path), **options, moe_expert_offload=True, moe_expert_cache_size=3, moe_prefetch=prefetch
    )
    stores = [layer.store for layer in cached.engine.decoder.moe_layers().values()]
    assert all(isinstance(store, DeviceStore) for store in stores)
    for lengths in ([3], [90], [2, 70, 5], [1, 1, 1]):
        outputs = [llm.generate(make_prompts(lengths), GREEDY) for llm in (resident, cached)]
        one, two = ([(o.token_ids, o.logprobs) for o in side] for side in outputs)
        assert one == two
    record = stores[0].layout.nbytes
    cache = cached.expert_cache()
    assert [counters.early_bytes > 0 for counters in cache.values()] == [False, prefetch, prefetch]
    for counters in cache.values():
        assert counters.num_bytes >= record * counters.misses + counters.early_bytes - counters.useful_bytes
    assert cached.engine.ledger().line("transient experts") == 8 * record, "all eight: fewer than four waves"
