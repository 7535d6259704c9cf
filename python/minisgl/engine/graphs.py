"""Decode steps as CUDA graphs: one replay instead of some thousand launches.

A graph is captured for each of a few batch sizes; a step takes the smallest that holds it, and the rest of its rows are
padding: they belong to the page table's padding row, write to the dummy page, see no keys and use no expert. Steps run one
after the other on one stream, so all graphs share their inputs, their logits and one memory pool: captured from the largest
down, the smaller ones live in what the largest has already taken.

    host    ids_S | positions_S | rows_S | kv_lens_S | num_valid        one copy
    graph   tokens, page table rows, write slots, all layers, logits    replayed; nothing is allocated, nothing waits
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl.attention.base import LayerCache
from minisgl.engine.inputs import DecodeInputs, PageTable, StepArrays
from minisgl.layers.moe import MoELayer
from minisgl.models.decoder import Decoder, DecoderInput
from minisgl.parallel import Group


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph, up to max_batch: 1, 2, 4, then multiples of 8, coarser above 64 (padding stays below 1/4)."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 4097, 64)]
    return [s for s in sizes if s < max_batch] + ([max_batch] if max_batch > 0 else [])


class GraphSafe(Protocol):
    """Something that knows whether a CUDA graph can hold what it does."""

    graph_safe: bool


def safe_sizes(sizes: Iterable[int], layers: Collection[MoELayer], others: Iterable[GraphSafe]) -> list[int]:
    """Those batch sizes whose step a graph can hold. A store is asked about the rows that it will place, which an exchange may
    make more than the batch has.
    """
    parts = [*others, *(part for layer in layers for part in (layer.backend, layer.exchange))]
    if not all(part.graph_safe for part in parts):
        return []
    return [
        size
        for size in sizes
        if all(layer.store.graph_safe(layer.exchange.most_rows(size)) for layer in layers)
    ]


@dataclass(frozen=True)
class _Captured:
    """A graph and the captured function, kept only because it owns tensors that the graph reads and writes; dropped, their
    memory would be given to others while the graph still points at it."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], torch.Tensor]
    num_collectives: int


class DecodeGraphs:
    """Captured decode steps of one decoder. num_bytes: device memory that they keep, the driver's own aside; seconds: how long
    capturing took.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        table: PageTable,
        sizes: Sequence[int],
        max_seq_len: int,
        group: Group,
    ) -> None:
        self._decoder, self._caches, self._group = decoder, caches, group
        self.sizes = sorted(sizes)
        torch.cuda.empty_cache()  # a capture does so, too; here, so that what it gives back is not taken off its bytes
        start, before = time.perf_counter(), torch.cuda.memory_reserved(table.device)
        largest = self.sizes[-1]
        self._inputs = DecodeInputs(largest, table, max_seq_len)
        self._logits_SV = torch.empty((largest, decoder.spec.vocab_size), device=table.device)
        pool = torch.cuda.graph_pool_handle()
        self._captured = {size: self._capture(size, pool) for size in reversed(self.sizes)}
        torch.cuda.synchronize(table.device)
        self.seconds = time.perf_counter() - start
        torch.cuda.empty_cache()
        self.num_bytes = torch.cuda.memory_reserved(table.device) - before

    def run(self, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [B, V] of a decode step and the rows [B] of the page table they belong to, both on the device and valid until
        the next call; None if it is not a decode step or no graph is large enough."""
        batch_size = len(arrays.rows_B)
        if arrays.max_q_len != 1 or len(arrays.logit_rows_N) != batch_size or batch_size > self.sizes[-1]:
            return None
        size = next(s for s in self.sizes if s >= batch_size)
        rows_B = self._inputs.send(arrays, size)
        captured = self._captured[size]
        captured.graph.replay()
        self._group.num_collectives += captured.num_collectives  # a replay joins them as the capture did
        return self._logits_SV[:batch_size], rows_B

    def close(self) -> None:
        """Give the graphs up. Before the group of ranks ends: NCCL waits for graphs that hold its kernels, for ever."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    def _capture(self, size: int, pool: Any) -> _Captured:
        inputs = self._inputs
        inputs.clear(size)
        batch = inputs.batch(size)
        plans = self._decoder.plan(batch)
        logits_SV = self._logits_SV[:size]

        def step() -> torch.Tensor:
            inputs.prepare(size)
            tokens_S, positions_S = inputs.tokens(size)
            step_input = DecoderInput(
                tokens_S,
                positions_S,
                batch,
                plans,
                num_valid=inputs.num_valid,
                logits_out=logits_SV,
            )
            return self._decoder(step_input, self._caches)

        # Compile and allocate whatever the first call needs, outside of the capture. On the stream of all other steps: another
        # one would keep temporaries and a workspace of cuBLAS of its own, for every size.
        step()
        graph, before = torch.cuda.CUDAGraph(), self._group.num_collectives
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            step()
        return _Captured(graph, step, self._group.num_collectives - before)
