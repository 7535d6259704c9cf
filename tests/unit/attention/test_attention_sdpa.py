"""The SDPA backend against the float64 loop: ragged batches, prefixes, GQA, windows, sinks, caps, poisoned
pages.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from minisgl.attention import ATTENTION_NAMES, AttentionProblem, LayerCache, make_attention
from minisgl.attention.reference import Case, attention_loop, max_error, random_case

CPU = torch.device("cpu")
MIXED = [(1, 1), (5, 5), (1, 37), (7, 40), (2, 0), (16, 16), (3, 3)]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_problem(**changes) -> AttentionProblem:
    base = AttentionProblem(4, 2, head_dim=16, page_size=16, dtype=torch.float32, scale=0.25)
    return dataclasses.replace(base, **changes)


def run(case: Case, name: str = "sdpa") -> torch.Tensor:
    backend = make_attention(name, case.problem, CPU)
    plan = backend.plan(case.problem, case.batch)
    return backend.forward(case.q_THC, case.cache, case.batch, plan, case.problem, case.sinks_H)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (7, 1), (8, 2)])
def test_equals_the_loop_for_page_sizes_and_groups(page_size, heads):
    problem = make_problem(page_size=page_size, num_heads=heads[0], num_kv_heads=heads[1])
    case = random_case(problem, MIXED, slack=3)
    assert max_error(run(case), case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 1, 5, 17, 100])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_equals_the_loop_for_windows_sinks_and_caps(window, sinks, soft_cap):
    case = random_case(
        make_problem(window=window, has_sinks=sinks, soft_cap=soft_cap, page_size=4, head_dim=24), MIXED
    )
    assert max_error(run(case), case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes_and_an_output_in_q_dtype(dtype):
    case = random_case(make_problem(dtype=dtype, head_dim=80), MIXED)
    out = run(case)
    assert out.dtype == dtype
    assert max_error(out, case) < TOLERANCE[dtype]


@pytest.mark.parametrize("lens", [[(1, 1)], [(64, 64)], [(1, 0)], [(1, 9)] * 5, [(0, 0), (0, 5), (2, 5)]])
def test_edges_of_a_batch(lens):
    case = random_case(make_problem(page_size=8), lens)
    out = run(case)
    assert out.shape == case.q_THC.shape
    assert max_error(out, case) < TOLERANCE[torch.float32]


def test_one_request_gives_the_same_bits_whatever_the_page_size_and_the_rest_of_the_batch():
    def first_request(page_size: int, lens: list[tuple[int, int]]) -> torch.Tensor:
        case = random_case(make_problem(page_size=page_size), lens)
        gen = torch.Generator().manual_seed(7)
        fixed = torch.randn(3, 20, 2, 16, generator=gen)
        table, j = case.batch.page_table_BP[0], torch.arange(20)
        case.cache.k_PSGC[table[j // page_size].long(), j % page_size] = fixed[0]
        case.cache.v_PSGC[table[j // page_size].long(), j % page_size] = fixed[1]
        q = case.q_THC.clone()
        q[:6] = fixed[2].flatten()[: 6 * 64].view(6, 4, 16)
        return run(dataclasses.replace(case, q_THC=q))[:6]

    alone = first_request(16, [(6, 20)])
    assert torch.equal(alone, first_request(1, [(6, 20), (4, 30), (1, 1)]))
    assert torch.equal(alone, first_request(5, [(6, 20), (2, 0)]))


def test_whole_prompt_equals_dense_sdpa_bit_for_bit():
    problem = make_problem(num_heads=4, num_kv_heads=4)
    case = random_case(problem, [(33, 33)])
    pages = case.batch.page_table_BP[0].long()
    k, v = (pool[pages].flatten(0, 1)[:33].transpose(0, 1) for pool in dataclasses.astuple(case.cache))
    q = case.q_THC.transpose(0, 1)
    dense = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=0.25)
    assert torch.equal(run(case), dense[0].transpose(0, 1))


def test_chunks_over_a_growing_cache_equal_the_whole_prompt():
    case = random_case(make_problem(page_size=4), [(30, 30)])
    whole = run(case)
    rows = []
    for start in range(0, 30, 7):
        end = min(start + 7, 30)
        batch = dataclasses.replace(
            case.batch,
            cu_q_B1=torch.tensor([0, end - start], dtype=torch.int32),
            kv_lens_B=torch.tensor([end], dtype=torch.int32),
            max_q_len=end - start,
        )
        part = dataclasses.replace(case, batch=batch, q_THC=case.q_THC[start:end], lens=((end - start, end),))
        rows.append(run(part))
    assert torch.allclose(torch.cat(rows), whole, atol=2e-6)


def test_write_puts_rows_at_their_slots_and_nowhere_else():
    cache = LayerCache(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cache.write(k, v, torch.tensor([4, 11, 7]))
    assert torch.equal(cache.k_PSGC.view(12, 2, 8)[[4, 11, 7]], k)
    assert torch.equal(cache.v_PSGC.view(12, 2, 8)[[4, 11, 7]], v)
    assert int(cache.k_PSGC.ne(0).any(-1).any(-1).sum()) == 3


def test_the_poison_of_a_case_reaches_a_backend_that_reads_too_far():
    case = random_case(make_problem(), [(4, 5)])
    longer = dataclasses.replace(case.batch, kv_lens_B=torch.tensor([6], dtype=torch.int32))
    assert max_error(run(dataclasses.replace(case, batch=longer)), case) == float("inf")


def test_the_loop_itself_is_softmax_attention():
    case = random_case(make_problem(num_heads=2, num_kv_heads=2, page_size=1), [(3, 3)])
    rows = case.batch.page_table_BP[0].long()
    k, v = case.cache.k_PSGC[rows, 0].double(), case.cache.v_PSGC[rows, 0].double()
    scores = torch.einsum("qhc,nhc->hqn", case.q_THC.double(), k) * 0.25
    probs = scores.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), float("-inf")).softmax(-1)
    assert torch.allclose(attention_loop(case), torch.einsum("hqn,nhc->qhc", probs, v))


def test_refusals_say_reason_and_alternatives():
    with pytest.raises(ValueError, match=r"unknown attention backend 'fast'.*auto.*sdpa"):
        make_attention("fast", make_problem(), CPU)
    with pytest.raises(ValueError, match=r"cannot be used.*int32.*Alternatives: auto, triton, flashinfer"):
        make_attention("sdpa", make_problem(dtype=torch.int32), CPU)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        make_problem(num_heads=5)
    with pytest.raises(ValueError, match="window=0"):
        make_problem(window=0)
    with pytest.raises(ValueError, match="soft_cap=0"):
        make_problem(soft_cap=0.0)
    with pytest.raises(ValueError, match="page_size=0"):
        make_problem(page_size=0)


def test_auto_serves_a_cpu():
    assert "auto" in ATTENTION_NAMES
    assert make_attention("auto", make_problem(), CPU).name == "sdpa"
