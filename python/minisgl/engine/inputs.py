"""From chunks (host numbers) to the tensors of one step, with one copy to the device.

Everything that differs between steps travels as one int64 array; whatever can be derived from it is derived on the device:

    host    ids_T | positions_T | rows_T | cu_q_B1 | kv_lens_B | rows_B | logit_rows_N
    device  id < 0       -> the token that the previous step sampled for that row
            write_slots_T = page_table[row, position // page_size] * page_size + position % page_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention.base import AttentionBatch
from minisgl.engine.step import Chunk


@dataclass(frozen=True)
class StepArrays:
    """One step as host arrays (int64); see the module's drawing."""

    ids_T: np.ndarray
    positions_T: np.ndarray
    rows_T: np.ndarray
    cu_q_B1: np.ndarray
    kv_lens_B: np.ndarray
    rows_B: np.ndarray
    logit_rows_N: np.ndarray
    max_q_len: int
    max_kv_len: int

    def parts(self) -> tuple[np.ndarray, ...]:
        return (
            self.ids_T, self.positions_T, self.rows_T, self.cu_q_B1, self.kv_lens_B, self.rows_B, self.logit_rows_N
        )  # fmt: skip


def step_arrays(chunks: Sequence[Chunk]) -> StepArrays:
    """Lay the chunks of a step one after the other."""
    lengths = np.array([c.length for c in chunks])
    rows_B = np.array([c.row for c in chunks])
    ends_B = np.cumsum(lengths)
    ids = [c.token_ids if c.token_ids is not None else [-1] for c in chunks]
    return StepArrays(
        ids_T=np.concatenate([np.asarray(i, dtype=np.int64) for i in ids]),
        positions_T=np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks]),
        rows_T=np.repeat(rows_B, lengths),
        cu_q_B1=np.concatenate([[0], ends_B]),
        kv_lens_B=np.array([c.start + c.length for c in chunks]),
        rows_B=rows_B,
        logit_rows_N=np.array(
            [end - 1 for end, c in zip(ends_B, chunks) if c.sample is not None], dtype=np.int64
        ),
        max_q_len=int(lengths.max()),
        max_kv_len=max(c.start + c.length for c in chunks),
    )


def to_device(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int64 tensors on the device: one pinned buffer, one copy, no wait."""
    packed = torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(packed.split([len(p) for p in parts]))


class PageTable:
    """Which page holds which part of which request, and each row's latest sampled token; both on the device.

    pages_RP int32 [rows + 1, P] and last_R int64 [rows + 1]. The last row is for padding: all of its pages are the dummy page.
    """

    def __init__(self, num_rows: int, max_seq_len: int, page_size: int, device: torch.device) -> None:
        self.page_size, self.device = page_size, device
        self.max_pages = -(-max_seq_len // page_size)
        self.padding_row = num_rows
        self.pages_RP = torch.zeros((num_rows + 1, self.max_pages), dtype=torch.int32, device=device)
        self.last_R = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def update(self, chunks: Sequence[Chunk]) -> None:
        """Enter the pages that the chunks' requests gained."""
        fresh = [c for c in chunks if len(c.pages)]
        if not fresh:
            return
        at = np.concatenate(
            [np.arange(c.first_page, c.first_page + len(c.pages)) + c.row * self.max_pages for c in fresh]
        )
        pages = np.concatenate([np.asarray(c.pages) for c in fresh])
        where, values = to_device([at, pages], self.device)
        self.pages_RP.view(-1).index_copy_(0, where, values.int())

    def tokens(self, ids_T: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
        """ids_T, with the latest sampled token where an id is negative."""
        return torch.where(ids_T < 0, self.last_R[rows_T], ids_T)

    def write_slots(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Where the keys and values of tokens at these positions of these rows go: page * page_size + row in the page."""
        page_T = self.pages_RP[rows_T, positions_T // self.page_size].long()
        return page_T * self.page_size + positions_T % self.page_size

    def batch(self, arrays: StepArrays, tensors: Sequence[torch.Tensor]) -> AttentionBatch:
        """The attention batch of an eager step. tensors: the device's copy of `arrays.parts()`."""
        _, positions_T, rows_T, cu_q_B1, kv_lens_B, rows_B, _ = tensors
        used = -(-arrays.max_kv_len // self.page_size)
        return AttentionBatch(
            cu_q_B1=cu_q_B1.int(),
            kv_lens_B=kv_lens_B.int(),
            page_table_BP=self.pages_RP[rows_B, :used],
            write_slots_T=self.write_slots(rows_T, positions_T),
            max_q_len=arrays.max_q_len,
            max_kv_len=arrays.max_kv_len,
        )
