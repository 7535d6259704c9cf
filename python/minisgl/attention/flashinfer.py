"""FlashInfer's paged attention behind the same plan. An optional extra, minisgl[flashinfer]; it compiles at first use.

One wrapper serves decode, prefill and mixed batches: with grouped heads FlashInfer's tensor-core decode is its prefill kernel.
FlashInfer cuts the work on the host, from lengths of this very step, so a plan reads the lengths back and holds for one content
only. Hence graph_safe is False; `--attention-backend flashinfer` leaves decode steps to the Triton backend (`mixed`).

Interface: https://docs.flashinfer.ai, BatchPrefillWithPagedKVCacheWrapper, NHD layout.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.base import AttentionBatch, AttentionProblem, LayerCache

flashinfer: Any = None
if importlib.util.find_spec("flashinfer"):
    import flashinfer

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 * 1024 * 1024  # what its documentation recommends for split results


@dataclass(frozen=True)
class FlashInferPlan:
    """The planned wrapper, and the rows of padding requests (they attend to the dummy page, and are zeroed after)."""

    wrapper: Any
    padding_rows: torch.Tensor | None


class FlashInferAttention:
    """`AttentionBackend` on CUDA with FlashInfer installed. A new plan replaces the one before.

    kernels: FlashInfer's own choice of them ("auto"), or "fa2" or "fa3" by name.
    """

    name = "flashinfer"
    graph_safe = False

    def __init__(self, kernels: str = "auto") -> None:
        self._wrapper: Any = None
        self._kernels = kernels

    def supports(self, problem: AttentionProblem, device: torch.device) -> str | None:
        if flashinfer is None:
            return 'FlashInfer is not installed: pip install "minisgl[flashinfer]"'
        if device.type != "cuda":
            return f"FlashInfer needs a CUDA device, not {device.type}"
        if problem.dtype not in DTYPES:
            return f"FlashInfer computes in float16 and bfloat16, not in {problem.dtype}"
        if problem.head_dim not in HEAD_DIMS:
            return f"FlashInfer has kernels for head_dim 64, 128 and 256, not {problem.head_dim}"
        if problem.has_sinks:
            return "attention sinks are served by the other backends only"
        return None

    def plan(self, problem: AttentionProblem, batch: AttentionBatch) -> FlashInferPlan:
        """Translate the batch to compressed page lists. Synchronises with the device.

        That wait is also what makes reuse of the wrapper's pinned buffer safe while earlier steps are in flight.
        """
        device, size = batch.kv_lens_B.device, problem.page_size
        kv_lens_B, cu_q_B1 = batch.kv_lens_B.cpu(), batch.cu_q_B1.cpu()
        padding_B = kv_lens_B == 0
        keys_B = torch.where(padding_B, 1, kv_lens_B)  # a request without keys borrows one of the dummy page
        pages_B = (keys_B + size - 1) // size
        kv_indptr_B1 = torch.nn.functional.pad(pages_B.cumsum(0), (1, 0)).to(torch.int32)
        used_BP = torch.arange(batch.page_table_BP.shape[1])[None, :] < pages_B[:, None]
        table_BP = torch.where(padding_B.to(device)[:, None], 0, batch.page_table_BP)
        wrapper = self._get_wrapper(device)
        wrapper.plan(
            cu_q_B1,
            kv_indptr_B1,
            table_BP[used_BP.to(device)],
            (keys_B - (pages_B - 1) * size).to(torch.int32),
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_dim,
            size,
            causal=True,
            sm_scale=problem.scale,
            window_left=-1 if problem.window is None else problem.window - 1,
            logits_soft_cap=problem.soft_cap,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
        )
        is_padding_T = padding_B.repeat_interleave((cu_q_B1[1:] - cu_q_B1[:-1]).long())
        rows = is_padding_T.nonzero().flatten().to(device) if bool(is_padding_T.any()) else None
        return FlashInferPlan(wrapper, rows)

    def _get_wrapper(self, device: torch.device) -> Any:
        if self._wrapper is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=self._kernels
            )
        return self._wrapper

    def forward(
        self,
        q_THC: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        plan: FlashInferPlan,
        problem: AttentionProblem,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_H is None, "refused by supports"
        out_THC = plan.wrapper.run(q_THC.contiguous(), (cache.k_PSGC, cache.v_PSGC))
        if plan.padding_rows is not None:
            out_THC.index_fill_(0, plan.padding_rows, 0.0)
        return out_THC
