"""Decode steps as CUDA graphs: one replay instead of some thousand launches.

A graph is captured for each of a few batch sizes; a step takes the smallest that holds it, and the rest of its rows are
padding: they belong to the page table's padding row, write to the dummy page, see no keys and use no expert. All graphs share
one memory pool, so they are captured from the largest down: the smaller ones live in what the largest has already taken.

    host    ids_S | positions_S | rows_S | kv_lens_S | num_valid        one copy into the graph's own buffer
    graph   tokens, page table rows, write slots, all layers, logits    replayed; nothing is allocated, nothing waits
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import AttentionBatch, LayerCache
from minisgl.engine.inputs import PageTable, StepArrays
from minisgl.models.decoder import Decoder, DecoderInput


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph, up to max_batch: 1, 2, 4, then multiples of 8, coarser above 64 (padding stays below 1/4)."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 4097, 64)]
    return [s for s in sizes if s < max_batch] + ([max_batch] if max_batch > 0 else [])


@dataclass(frozen=True)
class _Captured:
    """A graph with its input and output. step: the captured function, kept only because it owns every tensor that the graph
    reads and writes; dropped, their memory would be given to others while the graph still points at it."""

    graph: torch.cuda.CUDAGraph
    buffer: torch.Tensor
    logits_SV: torch.Tensor
    step: Callable[[], torch.Tensor]


class DecodeGraphs:
    """Captured decode steps of one decoder. bytes: device memory that capturing took; seconds: how long it took."""

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        table: PageTable,
        sizes: Sequence[int],
        max_seq_len: int,
    ) -> None:
        self._decoder, self._caches, self._table = decoder, caches, table
        self._max_seq_len = max_seq_len
        self._captured: dict[int, _Captured] = {}
        self.sizes = sorted(sizes)
        start, free = time.perf_counter(), torch.cuda.mem_get_info(table.device)[0]
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._captured[size] = self._capture(size, pool)
        torch.cuda.synchronize(table.device)
        self.seconds = time.perf_counter() - start
        self.num_bytes = max(0, free - torch.cuda.mem_get_info(table.device)[0])

    def run(self, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [B, V] of a decode step and the rows [B] of the page table they belong to, both on the device and valid until
        the next call; None if it is not a decode step or no graph is large enough."""
        batch_size = len(arrays.rows_B)
        if arrays.max_q_len != 1 or len(arrays.logit_rows_N) != batch_size or batch_size > self.sizes[-1]:
            return None
        size = next(s for s in self.sizes if s >= batch_size)
        captured = self._captured[size]
        captured.buffer.copy_(self._pack(arrays, size).pin_memory(), non_blocking=True)
        captured.graph.replay()
        rows_B = captured.buffer[2 * size : 2 * size + batch_size]
        return captured.logits_SV[:batch_size], rows_B

    def _pack(self, arrays: StepArrays, size: int) -> torch.Tensor:
        used = len(arrays.rows_B)
        packed = np.zeros(4 * size + 1, dtype=np.int64)
        packed[:used] = arrays.ids_T
        packed[size : size + used] = arrays.positions_T
        packed[2 * size : 3 * size] = self._table.padding_row
        packed[2 * size : 2 * size + used] = arrays.rows_B
        packed[3 * size : 3 * size + used] = arrays.kv_lens_B
        packed[-1] = used
        return torch.from_numpy(packed)

    def _capture(self, size: int, pool: Any) -> _Captured:
        device, table = self._table.device, self._table
        buffer = torch.zeros(4 * size + 1, dtype=torch.int64, device=device)
        buffer[2 * size : 3 * size] = table.padding_row
        ids_S, positions_S, rows_S, kv_lens_S, num_valid = buffer.split([size, size, size, size, 1])
        batch = AttentionBatch(
            cu_q_B1=torch.arange(size + 1, dtype=torch.int32, device=device),
            kv_lens_B=torch.zeros(size, dtype=torch.int32, device=device),
            page_table_BP=torch.zeros((size, table.max_pages), dtype=torch.int32, device=device),
            write_slots_T=torch.zeros(size, dtype=torch.int64, device=device),
            max_q_len=1,
            max_kv_len=self._max_seq_len,
        )
        valid = torch.zeros(1, dtype=torch.int32, device=device)
        plans = self._decoder.plan(batch)

        def step() -> torch.Tensor:
            valid.copy_(num_valid)
            batch.kv_lens_B.copy_(kv_lens_S)
            torch.index_select(table.pages_RP, 0, rows_S, out=batch.page_table_BP)
            batch.write_slots_T.copy_(table.write_slots(rows_S, positions_S))
            tokens_S = table.tokens(ids_S, rows_S)
            return self._decoder(
                DecoderInput(tokens_S, positions_S, batch, plans, num_valid=valid), self._caches
            )

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(
            stream
        ):  # compile and allocate whatever the first call needs, outside of the capture
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            logits_SV = step()
        return _Captured(graph, buffer, logits_SV, step)
