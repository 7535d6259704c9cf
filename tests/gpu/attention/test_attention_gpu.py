"""The Triton attention backend on a GPU: bf16 against SDPA in fp32, big batches, graphs with new content, offsets past 2^31."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minisgl.attention import AttentionBatch, AttentionProblem, LayerCache, make_attention
from minisgl.attention.flashinfer import FlashInferAttention
from minisgl.attention.reference import Case, max_error, random_case
from minisgl.attention.torch_sdpa import TorchAttention
from minisgl.attention.triton_paged import TritonAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 8e-3, torch.float32: 2e-5}  # outputs reach 5
DECODE = [(1, 1), (1, 700), (1, 0), (1, 64), (1, 4097), (1, 33)]
EXTEND = [(5, 5), (300, 1000), (2, 0), (1, 20), (64, 64), (1, 3000), (129, 129)]


def make_problem(**changes) -> AttentionProblem:
    base = AttentionProblem(32, 4, head_dim=128, page_size=16, dtype=torch.bfloat16, scale=128**-0.5)
    return dataclasses.replace(base, **changes)


def expected(case: Case) -> torch.Tensor:
    """The reference backend on the same values in fp32."""
    cache = LayerCache(case.cache.k_PSGC.float(), case.cache.v_PSGC.float())
    problem, backend = dataclasses.replace(case.problem, dtype=torch.float32), TorchAttention()
    plan = backend.plan(problem, case.batch)
    return backend.forward(case.q_THC.float(), cache, case.batch, plan, problem, case.sinks_H)


def run(case: Case, backend: TritonAttention | None = None) -> torch.Tensor:
    backend = backend or TritonAttention()
    plan = backend.plan(case.problem, case.batch)
    return backend.forward(case.q_THC, case.cache, case.batch, plan, case.problem, case.sinks_H)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 1, "num_heads": 28},
        {"page_size": 64, "num_heads": 16, "num_kv_heads": 8},
        {"head_dim": 64, "num_heads": 64, "num_kv_heads": 8, "has_sinks": True, "window": 128},
        {"head_dim": 256, "num_heads": 8, "soft_cap": 50.0, "dtype": torch.float16},
        {"head_dim": 80, "num_heads": 4},
        {"dtype": torch.float32, "num_heads": 8},
    ],
    ids=["qwen3_moe", "page_1_group_7", "page_64", "gpt_oss", "gemma", "head_80", "fp32"],
)
def test_ragged_batches_equal_sdpa(changes):
    problem = make_problem(**changes)
    for lens in (DECODE, EXTEND):
        case = random_case(problem, lens, CUDA, slack=2)
        assert max_error(run(case), case, expected(case)) < TOLERANCE[problem.dtype]


def test_a_big_batch():
    lens = [(1, 1 + (37 * i) % 500 if i % 5 else 0) for i in range(300)]
    case = random_case(make_problem(), lens, CUDA)
    assert max_error(run(case), case, expected(case)) < TOLERANCE[torch.bfloat16]


def test_a_graph_holds_for_new_content_and_survives_growing_scratch():
    problem, backend = make_problem(), TritonAttention()
    case = random_case(problem, [(1, 2000)] * 8, CUDA, slack=4)
    plan = backend.plan(problem, case.batch)
    q_THC = case.q_THC.clone()
    backend.forward(q_THC, case.cache, case.batch, plan, problem)  # compile outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THC = backend.forward(q_THC, case.cache, case.batch, plan, problem)
    before = backend.scratch.num_bytes
    run(random_case(problem, [(1, 40)] * 400, CUDA, slack=300), backend)
    assert backend.scratch.num_bytes > before
    torch.full((64 * 1024 * 1024,), float("nan"), device=CUDA)  # lands where freed scratch would have been
    for seed, kv_lens in enumerate([[2000] * 8, [1, 5, 0, 2000, 17, 0, 0, 900], [0] * 8, [64] * 8]):
        fresh = random_case(problem, [(1, n) for n in kv_lens], CUDA, seed=seed)
        case.batch.kv_lens_B.copy_(fresh.batch.kv_lens_B)
        width = fresh.batch.page_table_BP.shape[1]
        case.batch.page_table_BP[:, :width] = fresh.batch.page_table_BP
        pages = fresh.cache.k_PSGC.shape[0]
        case.cache.k_PSGC[:pages].copy_(fresh.cache.k_PSGC)
        case.cache.v_PSGC[:pages].copy_(fresh.cache.v_PSGC)
        q_THC.copy_(fresh.q_THC)
        graph.replay()
        assert max_error(out_THC, fresh, expected(fresh)) < TOLERANCE[torch.bfloat16]
        assert torch.equal(out_THC, run(fresh)), "an eager run gives the same bits"


def test_page_offsets_past_32_bits():
    problem = make_problem()
    num_pages = 2**31 // (16 * 4 * 128) + 64
    if torch.cuda.mem_get_info()[0] < 2 * 2 * num_pages * 16 * 4 * 128 + 2**30:
        pytest.skip("needs 10 GB of free GPU memory")
    shape = (num_pages, 16, 4, 128)
    cache = LayerCache(*(torch.empty(shape, dtype=torch.bfloat16, device=CUDA) for _ in range(2)))
    for lens in ([(1, 500)], [(40, 500)]):
        small = random_case(problem, lens, CUDA)
        shift = num_pages - small.cache.k_PSGC.shape[0]
        cache.k_PSGC[shift:].copy_(small.cache.k_PSGC)
        cache.v_PSGC[shift:].copy_(small.cache.v_PSGC)
        batch = dataclasses.replace(small.batch, page_table_BP=small.batch.page_table_BP + shift)
        big = dataclasses.replace(small, batch=batch, cache=cache)
        assert torch.equal(run(big), run(small))
        k_TGC = torch.randn(lens[0][0], 4, 128, device=CUDA, dtype=torch.bfloat16)
        cache.write(k_TGC, -k_TGC, batch.write_slots_T + shift * 16)
        assert torch.equal(cache.k_PSGC.view(-1, 4, 128)[batch.write_slots_T + shift * 16], k_TGC)
        assert torch.equal(cache.v_PSGC.view(-1, 4, 128)[batch.write_slots_T + shift * 16], -k_TGC)


@pytest.mark.parametrize("lens", [DECODE, EXTEND], ids=["decode", "extend"])
def test_repeats_are_bitwise_equal_and_never_synchronise(lens):
    case, backend = random_case(make_problem(), lens, CUDA), TritonAttention()
    first = run(case, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeats = [run(case, backend) for _ in range(100)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, repeat) for repeat in repeats)


def test_no_tokens_then_a_normal_call():
    problem, backend = make_problem(), TritonAttention()
    case = random_case(problem, DECODE, CUDA)
    zero = torch.zeros(0, dtype=torch.int32, device=CUDA)
    empty = AttentionBatch(
        torch.zeros(1, dtype=torch.int32, device=CUDA), zero, zero.view(0, 1), zero.long(), 1, 1
    )
    out = backend.forward(case.q_THC[:0], case.cache, empty, backend.plan(problem, empty), problem)
    assert out.shape == (0, 32, 128)
    case.cache.write(case.q_THC[:0, :4], case.q_THC[:0, :4], zero.long())
    assert max_error(run(case, backend), case, expected(case)) < TOLERANCE[torch.bfloat16]


def test_flashinfer_equals_sdpa():
    problem = make_problem()
    reason = FlashInferAttention().supports(problem, CUDA)
    if reason is not None:
        pytest.skip(reason)
    for lens in (DECODE, EXTEND):
        case, backend = random_case(problem, lens, CUDA, slack=2), FlashInferAttention()
        out = backend.forward(case.q_THC, case.cache, case.batch, backend.plan(problem, case.batch), problem)
        assert max_error(out, case, expected(case)) < TOLERANCE[torch.bfloat16]


def test_auto_is_triton_here_and_falls_back_where_it_cannot_serve():
    assert make_attention("auto", make_problem(), CUDA).name == "triton"
    assert make_attention("auto", make_problem(dtype=torch.float64), CUDA).name == "sdpa"
