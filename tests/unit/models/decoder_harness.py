"""Runs a decoder without an engine: a KV pool, one page table and hand-made batches, for tests of the decoder and loader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.attention import AttentionBatch, AttentionProblem, LayerCache, make_attention
from minisgl.attention.base import AttentionBackend
from minisgl.kvcache.pool import KVPool
from minisgl.models.decoder import Decoder, DecoderInput
from minisgl.models.experts import MoeFactory
from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec

CPU = torch.device("cpu")
PAGE_SIZE = 4


def cpu_attention(problem: AttentionProblem) -> AttentionBackend:
    return make_attention("auto", problem, CPU)


def empty_decoder(
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    moe_factory: MoeFactory | None = None,
) -> Decoder:
    return Decoder(
        spec, cpu_attention, page_size=PAGE_SIZE, device=device, dtype=dtype, moe_factory=moe_factory
    )


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = empty_decoder(ModelSpec.from_folder(folder), dtype)
    load_weights(decoder, folder)
    return decoder


class Session:
    """Sequences that grow: each `step` feeds some sequences their next tokens, and returns logits of every new token."""

    def __init__(self, decoder: Decoder, num_sequences: int, max_len: int) -> None:
        spec, self.decoder = decoder.spec, decoder
        pages = -(-max_len // PAGE_SIZE)
        num_pages = 1 + num_sequences * pages
        (kv_heads,) = {problem.num_kv_heads for problem in decoder.backends}
        pool = KVPool(spec.num_layers, num_pages, PAGE_SIZE, kv_heads, spec.head_dim, decoder.dtype, CPU)
        self.caches = [LayerCache(*pool.layer(i)) for i in range(spec.num_layers)]
        # Pages in a shuffled order: what is neighbouring in a sequence is not in the pool.
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.table_SP = order.view(num_sequences, pages).int()
        self.lengths = [0] * num_sequences

    def step(
        self, chunks: Sequence[tuple[int, list[int]]], rows: list[int] | None = None, num_padding: int = 0
    ) -> torch.Tensor:
        """chunks: (sequence, its next tokens). rows: which rows need logits. num_padding: rows of nobody at the end."""
        ids, positions, slots, starts = [], [], [], [0]
        for sequence, tokens in chunks:
            for token in tokens:
                position = self.lengths[sequence]
                page = int(self.table_SP[sequence, position // PAGE_SIZE])
                ids.append(token)
                positions.append(position)
                slots.append(page * PAGE_SIZE + position % PAGE_SIZE)
                self.lengths[sequence] += 1
            starts.append(len(ids))
        num_valid = len(ids)
        ids, positions, slots = (values + [0] * num_padding for values in (ids, positions, slots))
        kv_lens = [self.lengths[sequence] for sequence, _ in chunks]
        batch = AttentionBatch(
            cu_q_B1=torch.tensor(starts, dtype=torch.int32),
            kv_lens_B=torch.tensor(kv_lens, dtype=torch.int32),
            page_table_BP=self.table_SP[[sequence for sequence, _ in chunks]],
            write_slots_T=torch.tensor(slots),
            max_q_len=max(len(tokens) for _, tokens in chunks),
            max_kv_len=max(kv_lens),
        )
        step = DecoderInput(
            torch.tensor(ids),
            torch.tensor(positions),
            batch,
            self.decoder.plan(batch),
            None if rows is None else torch.tensor(rows),
            torch.tensor([num_valid], dtype=torch.int32) if num_padding else None,
        )
        return self.decoder(step, self.caches)
