"""The FlashInfer backend's translation of a batch, against a stand-in that computes what the documented arguments mean."""

from __future__ import annotations

import types

import pytest
import torch

from minisgl.attention import AttentionBatch, AttentionProblem, LayerCache, make_attention
from minisgl.attention import flashinfer as backend_module
from minisgl.attention.reference import max_error, random_case
from minisgl.attention.torch_sdpa import TorchAttention

CUDA = torch.device("cuda")


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper as its documentation describes it, computed by the reference backend."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert backend == "auto"
        assert layout == "NHD"

    def plan(
        self, qo_indptr, kv_indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, **options
    ):
        """With FlashInfer's own parameters, however many."""
        for lengths in (qo_indptr, kv_indptr, indices, last_page_len):
            assert lengths.dtype == torch.int32
        counts = kv_indptr[1:] - kv_indptr[:-1]
        assert len(indices) == kv_indptr[-1]
        assert bool((last_page_len >= 1).all())
        assert bool((last_page_len <= page_size).all())
        assert options["causal"]
        assert options["q_data_type"] == options["kv_data_type"]
        window = options["window_left"]
        self.problem = AttentionProblem(
            heads,
            kv_heads,
            head_dim,
            page_size,
            options["q_data_type"],
            options["sm_scale"],
            window=None if window == -1 else window + 1,
            soft_cap=options["logits_soft_cap"],
        )
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for b, count in enumerate(counts.tolist()):
            table[b, :count] = indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])]
        kv_lens = (counts - 1) * page_size + last_page_len
        # Rows that outnumber the keys would see none; the stand-in leaves such requests as padding, with NaN for their rows.
        self.lost = (qo_indptr[1:] - qo_indptr[:-1]) > kv_lens
        kv_lens = torch.where(self.lost, 0, kv_lens).to(torch.int32)
        self.batch = AttentionBatch(qo_indptr, kv_lens, table, torch.zeros(0), 99, 99)

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        reference = TorchAttention()
        plan = reference.plan(self.problem, self.batch)
        out = reference.forward(q, LayerCache(*paged_kv_cache), self.batch, plan, self.problem)
        lens = (self.batch.cu_q_B1[1:] - self.batch.cu_q_B1[:-1]).long()
        out[self.lost.repeat_interleave(lens)] = float("nan")
        return out


@pytest.fixture
def installed(monkeypatch):
    stand_in = types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandIn)
    monkeypatch.setattr(backend_module, "flashinfer", stand_in)
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 16)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"soft_cap": 2.0}])
def test_batches_are_translated(installed, page_size, options):
    problem = AttentionProblem(4, 2, 64, page_size, torch.float16, 0.125, **options)
    case = random_case(problem, [(1, 33), (3, 0), (5, 5), (1, 16), (1, 0), (20, 41)], slack=2)
    case.batch.page_table_BP[case.batch.kv_lens_B == 0] = 7  # stale rows of a page table must not be followed
    backend = backend_module.FlashInferAttention()
    out = backend.forward(case.q_THC, case.cache, case.batch, backend.plan(problem, case.batch), problem)
    assert max_error(out, case) < 4e-3
    assert bool((out[1:4] == 0).all())


def test_refusals(installed, monkeypatch):
    problem = AttentionProblem(4, 2, 64, 16, torch.bfloat16, 0.125)
    supports = backend_module.FlashInferAttention().supports
    assert supports(problem, CUDA) is None
    assert "CUDA" in str(supports(problem, torch.device("cpu")))
    for changes, reason in (
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 80}, "head_dim"),
        ({"has_sinks": True}, "sinks"),
    ):
        fields = {"head_dim": 64, "dtype": torch.bfloat16, **changes}
        assert reason in str(supports(AttentionProblem(4, 2, page_size=16, scale=0.125, **fields), CUDA))
    monkeypatch.setattr(backend_module, "flashinfer", None)
    with pytest.raises(
        ValueError, match=r"pip install \"minisgl\[flashinfer\]\".*Alternatives: auto, sdpa, triton"
    ):
        make_attention("flashinfer", problem, CUDA)
