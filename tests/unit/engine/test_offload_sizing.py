"""How many experts a layer keeps on the device, and what is said where the host or the device is too small."""

from __future__ import annotations

import dataclasses
from io import StringIO

import pytest
import torch
from rich.console import Console

from minisgl.config import EngineConfig, OffloadConfig
from minisgl.engine import offload as offload_module
from minisgl.engine.memory import GIB, DoesNotFit, num_transient_slots, predict_ledger, setup_of
from minisgl.engine.offload import (
    ExpertOffload,
    cache_report,
    cache_table,
    choose_mode,
    pages_for,
    size_cache,
)
from minisgl.models.sizes import ModelSizes, model_sizes
from minisgl.models.spec import ModelSpec
from minisgl.moe.store import CacheCounters
from minisgl.moe.store.early import MAX_EARLY_SLOTS
from minisgl.moe.store.pinned import HostFacts
from minisgl.resolve import Facts, resolve
from tests.unit.planner.configs import QWEN3_30B_A3B

GPU = Facts(has_cuda=True, has_bf16=True, checkpoint_dtype="bfloat16", context_length=40_960)
SIZES: ModelSizes = model_sizes(ModelSpec.from_config(QWEN3_30B_A3B))


def request(**options: object) -> EngineConfig:
    given = {"model": "m", "moe_expert_offload": True, "moe_expert_quantization": "int4", **options}
    return resolve(EngineConfig.from_kwargs(**given), GPU)[0]


def test_auto_fills_what_memory_leaves() -> None:
    config = request(max_running_requests=8, max_prefill_length=2048)
    assert config.cache.max_total_tokens == 32_768
    sized, decisions = size_cache(config, SIZES, 12 * GIB)
    slots = sized.offload.num_slots
    assert slots is not None
    assert 44 <= slots <= 60
    ledger = predict_ledger(SIZES, setup_of(sized, pages_for(32_768, 16)))
    record = SIZES.record_bytes("int4", torch.bfloat16)
    assert ledger.line("transient experts") == record * num_transient_slots(8, 128)
    spare = 12 * GIB - ledger.on("device")
    assert 0 <= spare < record * SIZES.num_sparse, "one more slot would not fit"
    assert ledger.line("experts") == slots * record * 48
    assert ledger.line("experts on the host") == 128 * record * 48
    assert decisions[0].value == str(slots)


def test_a_shorter_context_leaves_more_slots() -> None:
    fewer = size_cache(request(), SIZES, 12 * GIB)[0].offload.num_slots
    more = size_cache(request(max_total_tokens=4096), SIZES, 12 * GIB)[0].offload.num_slots
    assert fewer is not None and more is not None
    assert more > fewer + 10
    short = resolve(
        EngineConfig.from_kwargs(model="m", moe_expert_offload=True),
        dataclasses.replace(GPU, context_length=2048),
    )[0]
    assert short.cache.max_total_tokens == 2048


def test_explicit_slots_leave_the_kv_cache_to_memory() -> None:
    config = request(moe_expert_cache_size=16)
    assert config.cache.max_total_tokens is None
    sized, decisions = size_cache(config, SIZES, 12 * GIB)
    assert (sized.offload.num_slots, [d.flag for d in decisions]) == (16, ["--max-prefill-length"])


@pytest.mark.parametrize("options", [{"moe_expert_cache_size": 128}, {"moe_expert_cache_size": 500}, {}])
def test_a_slot_for_every_expert_needs_no_offload(options: dict[str, int]) -> None:
    sized, decisions = size_cache(request(**options), SIZES, 80 * GIB)
    assert not sized.offload.moe_expert_offload
    assert (decisions[0].flag, decisions[0].value) == ("--moe-expert-offload", "off")
    sized.validate()


def test_no_room_for_one_slot() -> None:
    with pytest.raises(DoesNotFit, match="Lower --max-total-tokens") as caught:
        size_cache(request(), SIZES, 5 * GIB)
    assert caught.value.needed > caught.value.available


def test_a_host_that_is_too_small_is_refused() -> None:
    config = OffloadConfig(moe_expert_offload=True, moe_expert_cache_size="8")
    facts = HostFacts(total=16 * GIB, available=10 * GIB)
    with pytest.raises(DoesNotFit, match=r"14\.4 GiB .* 10\.0 GiB .* quantize"):
        ExpertOffload(config, SIZES, 2_516_582, torch.device("cpu"), facts)


class CountingPinning:
    """Pretends to pin, up to a limit."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.pinned = limit, {}

    def pin(self, address: int, num_bytes: int) -> str | None:
        if sum(self.pinned.values()) + num_bytes > self.limit:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self.pinned[address] = num_bytes
        return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]


TINY = dataclasses.replace(SIZES, num_sparse=3, num_experts=8)
ROOMY = HostFacts(total=64 * GIB, available=60 * GIB)


def offload(mode: str = "auto", pinning: CountingPinning | None = None) -> ExpertOffload:
    config = OffloadConfig(moe_expert_offload=True, moe_expert_cache_size="4", moe_offload_mode=mode)
    return ExpertOffload(config, TINY, 4096, torch.device("cpu"), ROOMY, pinning)


def test_host_memory_is_pinned_once_and_given_back() -> None:
    pinning = CountingPinning()
    shared = offload(pinning=pinning)
    assert sum(pinning.pinned.values()) == 3 * 8 * 4096, "every record once"
    shared.close()
    assert pinning.pinned == {}
    assert offload().decisions == [], "nothing to tell on a CPU"


def test_layers_share_what_may_be_pinned() -> None:
    half = HostFacts(total=64 * GIB, available=2 * GIB + 3 * 8 * 2048)
    config = OffloadConfig(moe_expert_offload=True, moe_expert_cache_size="4")
    pinning = CountingPinning()
    shared = ExpertOffload(config, TINY, 4096, torch.device("cpu"), half, pinning)
    assert list(pinning.pinned.values()) == [4 * 4096] * 3
    shared.close()


def test_mode() -> None:
    assert choose_mode("auto", True, "")[0] == "device"
    assert choose_mode("staged", True, "") == ("staged", [])
    assert choose_mode("auto", False, "no pinning") == ("staged", [])
    mode, decisions = choose_mode("auto", True, "WSL2 pins half")
    assert (mode, decisions[0].reason) == ("staged", "WSL2 pins half")
    with pytest.raises(ValueError, match="no CUDA device; use staged or auto"):
        choose_mode("device", False, "")
    with pytest.raises(ValueError, match="WSL2 pins half; use auto or staged"):
        choose_mode("device", True, "WSL2 pins half")
    with pytest.raises(ValueError, match="no CUDA device"):
        offload("device")


def test_early_slots_are_counted_before_the_cache_is_sized() -> None:
    plain, early = request(), request(moe_prefetch=True)
    fewer, more = (size_cache(c, SIZES, 12 * GIB)[0] for c in (early, plain))
    assert fewer.offload.num_slots is not None and more.offload.num_slots is not None
    assert fewer.offload.num_slots == more.offload.num_slots - MAX_EARLY_SLOTS
    ledger = predict_ledger(SIZES, setup_of(fewer, pages_for(32_768, 16)))
    record = SIZES.record_bytes("int4", torch.bfloat16)
    assert ledger.line("experts") == more.offload.num_slots * record * 48
    staged = request(moe_offload_mode="staged", moe_expert_cache_size=8)
    assert predict_ledger(SIZES, setup_of(staged)).line("experts") == 8 * record * 48


def test_table_by_layer() -> None:
    def text(counted: dict[int, CacheCounters]) -> list[str]:
        console = Console(file=StringIO(), width=120)
        console.print(cache_table(counted))
        assert isinstance(console.file, StringIO)
        return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]

    plain = CacheCounters(300, 100, 60, 2_000_000)
    assert text({1: plain, 3: plain})[1:] == [
        "layer hits misses hit rate evictions MB",
        "1 300 100 75.0% 60 2.0",
        "3 300 100 75.0% 60 2.0",
    ]
    early = CacheCounters(300, 100, 60, 2_000_000, 500_000, 400_000, 1)
    assert text({1: plain, 3: early})[-1] == "3 300 100 75.0% 60 2.0 0.5 0.4 stopped"


def test_memory_that_ends_while_pinning_is_survived_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "CopyChannel", lambda *_: None)
    pinning = CountingPinning(limit=2 * 8 * 4096)
    config = OffloadConfig(moe_expert_offload=True, moe_expert_cache_size="4", moe_prefetch=True)
    shared = ExpertOffload(config, TINY, 4096, torch.device("cuda"), ROOMY, pinning)
    assert (shared.mode, shared.prefetches) == ("staged", False)
    told = {decision.flag: decision for decision in shared.decisions}
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told["--moe-offload-mode"].reason
    assert told["--moe-expert-offload"].value == "67% pinned"
    assert told["--moe-prefetch"].value == "off"
    shared._memory.close()
    assert pinning.pinned == {}
    with pytest.raises(ValueError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*; use auto or staged"):
        ExpertOffload(
            dataclasses.replace(config, moe_offload_mode="device"), TINY, 4096, torch.device("cuda"), ROOMY,
            CountingPinning(limit=2 * 8 * 4096),
        )  # fmt: skip


def test_layers_that_stopped_prefetching_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    shared, off, on = offload(), CacheCounters(early_off=1), CacheCounters()
    with caplog.at_level("INFO"):
        for counted in ({0: on, 1: off}, {0: on, 1: off}, {0: off, 1: off}):
            shared.tell(counted)
    assert ["[1]" in caplog.messages[0], "[0]" in caplog.messages[1], len(caplog.messages)] == [True, True, 2]


def test_steps_are_as_long_as_memory_allows() -> None:
    """Every chunk of a prompt brings all experts: the longest is the best that leaves a layer 2 x top-k slots."""
    sized, decisions = size_cache(request(max_running_requests=8), SIZES, 12 * GIB)
    assert sized.scheduler.max_prefill_length == 8192
    (step,) = (d for d in decisions if d.flag == "--max-prefill-length")
    missing = 128 - int(sized.offload.moe_expert_cache_size)
    tokens = missing * SIZES.record_bytes("int4", torch.bfloat16) * 2000 / (2 * 8 * 4_718_592)
    assert (
        f"the {missing} experts that a layer lacks travel for as long as {tokens:,.0f} tokens" in step.reason
    )
    small, decisions = size_cache(request(max_running_requests=8, max_total_tokens=8192), SIZES, 6 * GIB)
    length = small.scheduler.max_prefill_length
    assert length is not None and length < 8192
    assert int(small.offload.moe_expert_cache_size) >= 16
    longer = request(max_running_requests=8, max_total_tokens=8192, max_prefill_length=2 * length)
    slots = int(size_cache(longer, SIZES, 6 * GIB)[0].offload.moe_expert_cache_size)
    assert slots < 16
    (step,) = (d for d in decisions if d.flag == "--max-prefill-length")
    assert step.reason.endswith(f"{2 * length} tokens leave {slots} slots a layer")


def test_given_steps_and_steps_without_offload_are_kept() -> None:
    asked, decisions = size_cache(request(max_prefill_length=700), SIZES, 12 * GIB)
    assert asked.scheduler.max_prefill_length == 700
    assert not [d for d in decisions if d.flag == "--max-prefill-length"]
    resident = resolve(EngineConfig.from_kwargs(model="m"), GPU)[0]
    assert resident.scheduler.max_prefill_length == 8192
    given_slots = size_cache(request(moe_expert_cache_size=40), SIZES, 12 * GIB)[0]
    assert given_slots.scheduler.step_tokens == 8192
    no_room = size_cache(request(moe_expert_cache_size=40, max_running_requests=8), SIZES, 7 * GIB)[0]
    assert no_room.scheduler.max_prefill_length == 512, "the engine's own check then says what is missing"
    on_cpu = size_cache(request(device="cpu", moe_expert_cache_size=16), SIZES, None)[0]
    assert on_cpu.scheduler.max_prefill_length == 8192


def test_report() -> None:
    line = cache_report(CacheCounters(300, 100, 60, 2_000_000), 8)
    assert line == "expert cache: 75.0% of 400 experts were in one of 8 slots a layer, 2.0 MB copied"
    assert CacheCounters().hit_rate == 0
    line = cache_report(CacheCounters(300, 100, 60, 2_000_000, 500_000, 400_000, 3), 8)
    assert line.endswith(
        "2.0 MB copied; 0.5 MB of them early, 80% of which was needed; prefetching did not pay in 3 layers and stopped there"
    )
