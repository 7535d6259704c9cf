"""The expert caches on CUDA: pinned memory, copies that are late, graphs, and the bits of the resident store throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.layers.moe import MoELayer, Router
from minisgl.moe.base import ExpertShape, RoutingRule
from minisgl.moe.formats import get_format
from minisgl.moe.store import ExpertStore, ResidentStore, StagedStore
from minisgl.moe.store.copies import CopyChannel, CudaCopies
from minisgl.moe.store.pinned import GIB, CudaPinning, HostMemory
from minisgl.moe.store.planning import SlotTable, place_step
from tests.e2e.model_factory import make_model, make_prompts

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.store import device_cache, device_plan
from minisgl.moe.store.device_cache import DeviceStore
from minisgl.moe.store.device_plan import DevicePlan
from minisgl.moe.store.overlap import Forked, Serial
from minisgl.moe.store.streaming import TransientSlots

E, K, D, F = 32, 4, 256, 128
SHAPE, CUDA = ExpertShape(D, F), torch.device("cuda")
DELAY = 2_000_000  # cycles: about a millisecond
FORMATS = ["none", "fp8", "int4"]


class LateChannel(CopyChannel):
    """Every copy starts a millisecond late."""

    def copy(self, target_B: torch.Tensor, record_B: torch.Tensor, pinned: bool) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(DELAY)
        super().copy(target_B, record_B, pinned)


class LateFork(Forked):
    """Every fetch starts a millisecond late."""

    def begin(self, fetches: Sequence[Callable[[], None]]) -> None:
        def late(fetch: Callable[[], None]) -> None:
            torch.cuda._sleep(DELAY)
            fetch()

        super().begin([partial(late, fetch) for fetch in fetches])


def serve_prompts(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Whether a prompt is planned by the device ("passing"), or by the host ("streaming"), whatever would be faster."""
    monkeypatch.setattr(device_cache, "passes", lambda *_, **__: way == "passing")


@pytest.fixture
def memory():
    host = HostMemory(CudaPinning(), GIB)
    yield host
    torch.cuda.synchronize()
    host.close()
    assert host.pinned_bytes == 0


def make_store(kind: str, memory: HostMemory, name: str, num_slots: int, late: bool = False) -> ExpertStore:
    weight_format = get_format(name, torch.bfloat16, group_size=32)
    nbytes = weight_format.bytes_per_expert(SHAPE)
    host = memory.allocate(E, nbytes, pin_at_most=E if kind != "staged" else E // 2)
    channel = (LateChannel if late else CopyChannel)(CUDA, memory, 4, nbytes)

    def copies(slab_SB: torch.Tensor) -> CudaCopies:
        return CudaCopies(channel, slab_SB)

    if kind == "staged":
        store = StagedStore(host, SHAPE, weight_format, num_slots, CUDA, copies, wave_size=3)
    else:
        assert host.num_pinned == E
        overlap = Serial() if kind == "serial" else (LateFork if late and kind == "forked" else Forked)(CUDA)
        overlap.in_turn = kind == "in turn"
        store = DeviceStore(
            host,
            SHAPE,
            weight_format,
            num_slots,
            K,
            CUDA,
            lambda slab: TransientSlots(slab, 6, copies),
            overlap,
        )
    store.fill_random(seed=0, std=0.1)
    store.slab.records_SB.fill_(0xFF)  # NaN, or nonsense
    return store


def make_layers(store: ExpertStore) -> tuple[MoELayer, MoELayer]:
    """(resident, cached) with one backend each."""
    resident = ResidentStore(E, SHAPE, store.format, CUDA)
    for target_B, record_B in zip(resident.records_EB, store.records_EB):
        target_B.copy_(record_B)  # one copy of all can't span pinned and other memory
    router = Router(E, D, RoutingRule(K), device=CUDA, dtype=torch.bfloat16)
    router.weight.normal_()
    return MoELayer(router, resident, FusedMoeBackend()), MoELayer(router, store, FusedMoeBackend())


def random_x(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, D, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["forked", "in turn", "serial", "staged"])
def test_equal_to_resident_with_late_copies(
    memory: HostMemory, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "in turn":  # one program, 256 bytes at a time
        monkeypatch.setattr(device_plan, "FETCH_PROGRAMS", 1)
        monkeypatch.setattr(device_plan, "FETCH_WORDS", 32)
    for num_slots in (1, 9, E):
        store = make_store(kind, memory, name, num_slots, late=True)
        resident, cached = make_layers(store)
        ways = ("passing", "passing", "streaming")
        for index, num_tokens in enumerate((1, 1, 2, 8, 64, 200, 1, 70, 3, 64, 8, 2)):
            serve_prompts(monkeypatch, ways[index % 3])
            x = random_x(num_tokens)
            assert torch.equal(cached(x), resident(x)), f"{num_slots} slots, {num_tokens} tokens"


def test_a_short_prompt_never_waits_and_leaves_the_same_cache(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned by the device as if the host had planned it, between decode steps; with more experts than transient slots."""
    pairs = [make_layers(make_store("forked", memory, "fp8", 9)) for _ in range(2)]
    pairs[1][1].router.weight.copy_(pairs[0][1].router.weight)
    for num_tokens in (1, 8, 8, 1, 64, 200, 1, 64):
        x = random_x(num_tokens)
        expected = pairs[0][0](x)
        torch.cuda.synchronize()
        for way, (_, cached) in zip(("passing", "streaming"), pairs):
            serve_prompts(monkeypatch, way)
            torch.cuda.set_sync_debug_mode("error" if way == "passing" else "default")
            try:
                y = cached(x)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(y, expected)
        one, two = (cached.store for _, cached in pairs)
        assert one.plan.expert_of_S.tolist() == two.plan.expert_of_S.tolist()
        assert one.counters() == two.counters()
        held = one.plan.expert_of_S.cpu()
        assert torch.equal(one.slab.records_SB.cpu()[held >= 0], one.records_EB[held[held >= 0].long()])


@pytest.mark.parametrize("kind", ["forked", "in turn"])
def test_a_graph_holds_decode_steps(memory: HostMemory, kind: str) -> None:
    """Three layers, replayed with inputs that route elsewhere every time, a late fetch, and padding rows."""
    pairs = [make_layers(make_store(kind, memory, "fp8", 9, late=True)) for _ in range(3)]
    for batch in (1, 2, 8):
        x, valid = random_x(batch), torch.full((1,), batch, dtype=torch.int32, device=CUDA)

        def step(x: torch.Tensor = x, valid: torch.Tensor = valid) -> torch.Tensor:
            y = x
            for _, cached in pairs:
                y = y + cached(y, valid)
            return y

        assert all(cached.store.graph_safe(batch) for _, cached in pairs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        for used in (batch, batch, max(1, batch - 1), batch):
            x.copy_(random_x(batch))
            valid.fill_(used)
            graph.replay()
            expected = x
            for resident, _ in pairs:
                expected = expected + resident(expected, valid)
            assert torch.equal(y[:used], expected[:used])


def test_the_kernels_agree_with_the_definition_on_the_device() -> None:
    """As the interpreter's test, where barriers and memory order are real."""
    for num_experts, num_slots, top_k in ((128, 8, 8), (128, 49, 8), (512, 100, 10), (32, 32, 4)):
        plan, table = DevicePlan(num_experts, num_slots, CUDA), SlotTable(num_experts, num_slots)
        for now in range(1, 60):
            num_tokens = 1 + now % 5
            ids_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
            experts = ids_TK.unique().tolist()
            counts = {e: int((ids_TK == e).sum()) for e in experts}
            waves, ids_TK = place_step(table, counts, now), ids_TK.cuda()
            for index in range(plan.num_waves(*ids_TK.shape)):
                plan.place(ids_TK, first=index == 0)
                count = int(plan.num_fetch)
                pairs = zip(plan.fetch_experts_S[:count].tolist(), plan.fetch_slots_S[:count].tolist())
                loads = waves[index].loads if index < len(waves) else ()
                assert list(pairs) == [(load.expert, load.slot) for load in loads]
            assert plan.slot_of_E.tolist() == table.slot_of_E
            assert plan.uses_E.tolist() == [table.num_uses(e) for e in range(num_experts)]


def test_fetch_speed_and_bits(memory: HostMemory) -> None:
    """Records of Qwen3-30B-A3B in fp8: exactly copied, at more than half of what the copy engine reaches here."""
    nbytes, count = 4_732_928, 16
    host = memory.allocate(count, nbytes)
    assert host.records_EB.is_pinned()
    host.records_EB.random_(0, 255)
    slab_SB = torch.empty((count, nbytes), dtype=torch.uint8, device=CUDA)
    plan = DevicePlan(count, count, CUDA)
    plan.place(torch.arange(count, dtype=torch.int32, device=CUDA)[None], first=True)

    def milliseconds(call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def by_kernel() -> None:
        plan.fetch(host.records_EB, slab_SB)

    def by_engine() -> None:
        slab_SB.copy_(host.records_EB, non_blocking=True)

    by_kernel()
    assert torch.equal(slab_SB[plan.slot_of_E.long()].cpu(), host.records_EB)
    by_engine()
    # Other processes take the link and, slice by slice, the device: one call at a time, in turn, and the best of each counts.
    kernel_ms, engine_ms = float("inf"), float("inf")
    for _ in range(50):
        kernel_ms, engine_ms = (
            min(kernel_ms, milliseconds(by_kernel)),
            min(engine_ms, milliseconds(by_engine)),
        )
    print(
        f"fetch {count * nbytes / kernel_ms / 1e6:.1f} GB/s, copy engine {count * nbytes / engine_ms / 1e6:.1f}"
    )
    slab_SB.zero_()
    by_kernel()
    assert torch.equal(slab_SB[plan.slot_of_E.long()].cpu(), host.records_EB)
    assert kernel_ms < 2 * engine_ms


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("mode", ["device", "streaming", "prefetch", "staged"])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_text_equals_resident(
    tmp_path: Path, mode: str, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """streaming: prompts as a host plans them, which has no time to for experts as small as these."""
    if mode == "streaming":
        serve_prompts(monkeypatch, mode)
    make_model(tmp_path, "qwen3_moe")
    options = {"device": "cuda", "dtype": "bfloat16", "num_pages": 300, "max_running_requests": 8}
    if mode == "staged":  # which no graph holds; a padded batch would choose other kernels
        options["cuda_graph_max_bs"] = 0
    batches = [make_prompts(lengths) for lengths in ([3], [90], [1, 20, 200, 7, 33], [64] * 8)]
    resident = LLM(str(tmp_path), **options)
    expected = [[o.token_ids for o in resident.generate(batch, GREEDY)] for batch in batches]
    cached = LLM(
        str(tmp_path),
        **options,
        moe_expert_offload=True,
        moe_offload_mode="staged" if mode == "staged" else "device",
        moe_expert_cache_size=num_slots,
        moe_prefetch=mode == "prefetch",
    )
    assert [[o.token_ids for o in cached.generate(batch, GREEDY)] for batch in batches] == expected
    counted = cached.expert_cache().values()
    assert all(c.hits + c.misses for c in counted)
    assert (sum(c.early_bytes for c in counted) > 0) == (mode == "prefetch")
    offload = cached.engine._offload
    assert offload is not None
    assert offload._memory.pinned_bytes > 0
    cached.close()
    assert offload._memory.pinned_bytes == 0


def test_a_decode_step_never_waits(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(
        str(tmp_path), device="cuda", dtype="bfloat16", num_pages=100, max_running_requests=2,
        moe_expert_offload=True, moe_offload_mode="device", moe_expert_cache_size=4,
    )  # fmt: skip
    stream = llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        next(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            llm.scheduler.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.close()
    llm.close()


def test_a_refusal_to_pin_is_survived(memory: HostMemory) -> None:
    """The driver refuses to pin a range twice; the records are then ordinary memory, and kernels still launch."""
    pinning = CudaPinning()
    records = memory.allocate(4, 4096)
    refusal = pinning.pin(records.records_EB.data_ptr(), 4096)
    assert refusal is not None and refusal.startswith("CUDA_ERROR")
    assert torch.zeros(4, device=CUDA).add(1).sum().item() == 4, "no error is left behind"
