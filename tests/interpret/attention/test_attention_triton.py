"""The Triton attention kernels in the interpreter, against the float64 loop: page sizes, groups, prefixes, windows, poison."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minisgl.attention import AttentionProblem, LayerCache, make_attention
from minisgl.attention import triton_paged as tp
from minisgl.attention.reference import Case, max_error, random_case
from minisgl.attention.store import launch_store

CPU = torch.device("cpu")
DECODE = tp.DecodeTile(block_n=16, num_warps=4, num_stages=2, wave_programs=16)
EXTEND = tp.ExtendTile(block_m=16, block_n=16, num_warps=4, num_stages=1)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}

# A batch of one-row requests: no history, several chunks, padding, page boundaries. Then rows and prefixes of all kinds.
SINGLE = [(1, 1), (1, 70), (1, 0), (1, 33), (1, 16)]
RAGGED = [(5, 5), (7, 40), (2, 0), (1, 20), (16, 16)]


def make_problem(**changes) -> AttentionProblem:
    base = AttentionProblem(2, 1, head_dim=16, page_size=16, dtype=torch.float32, scale=0.25)
    return dataclasses.replace(base, **changes)


def run(case: Case, decode: tp.DecodeTile = DECODE, extend: tp.ExtendTile = EXTEND) -> torch.Tensor:
    """One forward with scratch full of NaN, so that a chunk that is read but was never written shows."""
    backend = tp.TritonAttention(decode, extend)
    plan = backend.plan(case.problem, case.batch)
    if plan.split is not None:
        plan.split.part.fill_(float("nan"))
        plan.split.lse.fill_(float("nan"))
    return backend.forward(case.q_THC, case.cache, case.batch, plan, case.problem, case.sinks_H)


def check(problem: AttentionProblem, lens: list[tuple[int, int]], **tiles) -> None:
    case = random_case(problem, lens, slack=2)
    assert max_error(run(case, **tiles), case) < TOLERANCE[problem.dtype]


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not tp.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")


@pytest.mark.parametrize("lens", [SINGLE, RAGGED], ids=["decode", "extend"])
class TestAgainstTheLoop:
    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_page_sizes(self, lens, page_size):
        check(make_problem(page_size=page_size), lens)

    @pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1), (17, 1)])
    def test_groups(self, lens, heads):
        check(make_problem(num_heads=heads[0], num_kv_heads=heads[1]), lens)

    @pytest.mark.parametrize("head_dim", [8, 64, 80])
    def test_head_dims(self, lens, head_dim):
        check(make_problem(head_dim=head_dim), lens)

    @pytest.mark.parametrize(("window", "page_size"), [(1, 16), (5, 1), (20, 4), (33, 32)])
    def test_windows(self, lens, window, page_size):
        check(make_problem(window=window, page_size=page_size), lens)

    @pytest.mark.parametrize("window", [None, 9])
    def test_sinks_and_caps(self, lens, window):
        check(make_problem(window=window, has_sinks=True, soft_cap=2.0, head_dim=24), lens)

    def test_half_precision(self, lens):
        check(make_problem(dtype=torch.float16), lens)

    def test_tiles_wider_than_a_page_or_the_context(self, lens):
        check(make_problem(), lens, decode=dataclasses.replace(DECODE, block_n=32))
        check(make_problem(page_size=8), lens, extend=dataclasses.replace(EXTEND, block_m=32, block_n=64))


@pytest.mark.parametrize(
    "lens", [[(1, 1)], [(1, 0)], [(1, 48)], [(33, 33)], [(3, 48)], [(0, 0), (0, 5), (2, 18)]]
)
def test_small_batches(lens):
    check(make_problem(), lens)


def test_rows_of_a_mixed_batch_that_are_alone_are_split():
    case = random_case(make_problem(), [(1, 600), (3, 20), (1, 1), (1, 0)])
    plan = tp.TritonAttention(DECODE, EXTEND).plan(case.problem, case.batch)
    assert plan.extend is not None
    assert plan.split is not None
    assert max_error(run(case), case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("wave_programs", [1, 4, 4000])
def test_any_number_of_chunks_gives_the_same_answer_within_the_bound(wave_programs):
    tile = dataclasses.replace(DECODE, wave_programs=wave_programs)
    case = random_case(make_problem(), [(1, 90), (1, 3), (1, 64), (1, 17)])
    backend = tp.TritonAttention(tile)
    plan = backend.plan(case.problem, case.batch).split
    assert plan is not None
    assert max_error(run(case, decode=tile), case) < TOLERANCE[torch.float32]
    backend.forward(case.q_THC, case.cache, case.batch, tp.TritonPlan(None, plan), case.problem)
    assert int(plan.num_chunks_B.sum()) <= plan.max_chunks
    assert plan.first_chunk_B.tolist() == [0, *plan.num_chunks_B.cumsum(0).tolist()[:-1]]
    assert int(plan.num_chunks_B[0]) == {1: 1, 4: 3, 4000: 6}[wave_programs]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_one_chunk_goes_straight_to_the_output(has_sinks):
    case = random_case(make_problem(has_sinks=has_sinks), [(1, 16), (1, 40), (1, 0)])
    backend = tp.TritonAttention(DECODE)
    plan = backend.plan(case.problem, case.batch)
    assert plan.split is not None
    plan.split.part.fill_(float("nan"))
    out = backend.forward(case.q_THC, case.cache, case.batch, plan, case.problem, case.sinks_H)
    assert plan.split.num_chunks_B.tolist() == [1, 3, 0]
    assert plan.split.part.view(-1, 2, 16)[0].isnan().all()
    assert max_error(out, case) < TOLERANCE[torch.float32]


def test_a_plan_stays_valid_when_the_content_of_the_batch_changes():
    problem = make_problem()
    first = random_case(problem, [(1, 90), (1, 90), (1, 90)], slack=1)
    backend = tp.TritonAttention(DECODE)
    plan = backend.plan(problem, first.batch)
    for lens in ([(1, 1), (1, 0), (1, 80)], [(1, 90), (1, 17), (1, 0)], [(1, 0)] * 3):
        case = random_case(problem, lens, seed=3)
        first.batch.kv_lens_B.copy_(case.batch.kv_lens_B)
        width = case.batch.page_table_BP.shape[1]
        first.batch.page_table_BP[:, :width] = case.batch.page_table_BP
        out = backend.forward(case.q_THC, case.cache, first.batch, plan, problem)
        assert max_error(out, case) < TOLERANCE[torch.float32]


def test_padding_requests_leave_the_bits_of_the_others_alone():
    problem = make_problem()
    lens = [(1, 50), (1, 9)]
    plain, padded = random_case(problem, lens), random_case(problem, [*lens, (1, 0), (1, 0)], slack=5)
    grown = dataclasses.replace(padded, cache=plain.cache, q_THC=torch.cat([plain.q_THC, padded.q_THC[2:]]))
    grown.batch.page_table_BP[:2, : plain.batch.page_table_BP.shape[1]] = plain.batch.page_table_BP
    assert torch.equal(run(grown)[:2], run(plain))


def test_q_may_be_a_slice_of_a_fused_projection():
    case = random_case(make_problem(num_heads=4), RAGGED)
    fused = torch.randn(case.q_THC.shape[0], 8, 16)
    fused[:, 2:6] = case.q_THC
    assert torch.equal(run(dataclasses.replace(case, q_THC=fused[:, 2:6])), run(case))


def test_outgrown_scratch_is_kept():
    scratch = tp.Scratch()
    small = scratch.take([10, 3], CPU)
    assert [part.numel() for part in small] == [10, 3]
    big = scratch.take([1000], CPU)[0]
    assert scratch.take([5], CPU)[0].data_ptr() == big.data_ptr()
    small[0].fill_(1.0)  # a captured graph may still write here
    assert scratch.num_bytes >= 4 * 1013


def test_store_writes_strided_rows_at_their_slots_and_nowhere_else():
    cache = LayerCache(torch.zeros(3, 4, 2, 24), torch.zeros(3, 4, 2, 24))
    fused = torch.randn(3, 5, 24)
    launch_store(cache.k_PSGC, cache.v_PSGC, fused[:, 1:3], fused[:, 3:5], torch.tensor([4, 11, 7]))
    assert torch.equal(cache.k_PSGC.view(12, 2, 24)[[4, 11, 7]], fused[:, 1:3])
    assert torch.equal(cache.v_PSGC.view(12, 2, 24)[[4, 11, 7]], fused[:, 3:5])
    assert int(cache.k_PSGC.ne(0).any(-1).any(-1).sum()) == 3


def test_refusals():
    with pytest.raises(
        ValueError, match=r"interpreter multiplies bfloat16 wrongly.*Alternatives: auto, sdpa, flashinfer"
    ):
        make_attention("triton", make_problem(dtype=torch.bfloat16), CPU)
    with pytest.raises(ValueError, match="head_dim 320 is above 256"):
        make_attention("triton", make_problem(head_dim=320), CPU)
    with pytest.raises(ValueError, match=r"not in torch\.float64"):
        tp.TritonAttention().plan(
            make_problem(dtype=torch.float64), random_case(make_problem(), SINGLE).batch
        )
    assert make_attention("triton", make_problem(), CPU).name == "triton"
