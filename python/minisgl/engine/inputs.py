"""From chunks (host numbers) to the tensors of one step, with one copy to the device.

Everything that differs between steps travels as one int64 array; whatever can be derived from it is derived on the device:

    host    ids_T | positions_T | rows_T | cu_q_B1 | kv_lens_B | rows_B | logit_rows_N, score_rows_S | targets_S
    device  id < 0       -> the token that the previous step sampled for that row
            write_slots_T = page_table[row, position // page_size] * page_size + position % page_size

A decode step, which a CUDA graph repeats, needs less, and derives it in one launch on CUDA (`DecodeInputs`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import AttentionBatch
from minisgl.engine.step import Chunk

HAS_TRITON = importlib.util.find_spec("triton") is not None  # platforms without it have no CUDA either
# Any: Triton's launch syntax is beyond type checkers.
kernels: Any = importlib.import_module("minisgl.engine.kernels") if HAS_TRITON else None
PAGES_BLOCK = 1024  # page ids that a program copies


@dataclass(frozen=True)
class StepArrays:
    """One step as host arrays (int64); see the module's drawing. logit_rows_N: tokens after which one is sampled. score_rows_S:
    tokens after which targets_S are to be judged.
    """

    ids_T: np.ndarray
    positions_T: np.ndarray
    rows_T: np.ndarray
    cu_q_B1: np.ndarray
    kv_lens_B: np.ndarray
    rows_B: np.ndarray
    logit_rows_N: np.ndarray
    score_rows_S: np.ndarray
    targets_S: np.ndarray
    max_q_len: int
    max_kv_len: int

    def parts(self) -> tuple[np.ndarray, ...]:
        wanted_X = np.concatenate([self.logit_rows_N, self.score_rows_S])
        return (
            self.ids_T, self.positions_T, self.rows_T, self.cu_q_B1, self.kv_lens_B, self.rows_B, wanted_X, self.targets_S
        )  # fmt: skip


def step_arrays(chunks: Sequence[Chunk]) -> StepArrays:
    """Lay the chunks of a step one after the other."""
    lengths = np.array([c.length for c in chunks])
    rows_B = np.array([c.row for c in chunks])
    ends_B = np.cumsum(lengths)
    ids = [c.token_ids if c.token_ids is not None else [-1] for c in chunks]
    scored = [(end - c.length, c.score.targets) for end, c in zip(ends_B, chunks) if c.score is not None]
    nothing = np.zeros(0, dtype=np.int64)
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
        score_rows_S=np.concatenate([nothing, *(first + np.arange(len(t)) for first, t in scored)]),
        targets_S=np.concatenate([nothing, *(np.asarray(t, dtype=np.int64) for _, t in scored)]),
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
        _, positions_T, rows_T, cu_q_B1, kv_lens_B, rows_B, *_ = tensors
        used = -(-arrays.max_kv_len // self.page_size)
        return AttentionBatch(
            cu_q_B1=cu_q_B1.int(),
            kv_lens_B=kv_lens_B.int(),
            page_table_BP=self.pages_RP[rows_B, :used],
            write_slots_T=self.write_slots(rows_T, positions_T),
            max_q_len=arrays.max_q_len,
            max_kv_len=arrays.max_kv_len,
        )


class DecodeInputs:
    """What decode steps of up to `max_size` requests read, at addresses that never change.

    A step of S rows travels as one int64 array, ids_S | positions_S | rows_S | kv_lens_S | number of rows that are real, and
    everything else follows from it on the device. Steps of all sizes share the tensors, so one may only start where
    the one before has ended: on one stream.
    """

    def __init__(self, max_size: int, table: PageTable, max_seq_len: int) -> None:
        device = table.device
        self.device, self._table, self._max_seq_len = device, table, max_seq_len
        self.packed = torch.zeros(4 * max_size + 1, dtype=torch.int64, device=device)
        self.tokens_S = torch.zeros(max_size, dtype=torch.int64, device=device)
        self.kv_lens_S = torch.zeros(max_size, dtype=torch.int32, device=device)
        self.write_slots_S = torch.zeros(max_size, dtype=torch.int64, device=device)
        self.page_table_SP = torch.zeros((max_size, table.max_pages), dtype=torch.int32, device=device)
        self.num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self._cu_q_S1 = torch.arange(max_size + 1, dtype=torch.int32, device=device)

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of steps of `size` rows. Entries of its page table behind a row's last key are undefined."""
        return AttentionBatch(
            cu_q_B1=self._cu_q_S1[: size + 1],
            kv_lens_B=self.kv_lens_S[:size],
            page_table_BP=self.page_table_SP[:size],
            write_slots_T=self.write_slots_S[:size],
            max_q_len=1,
            max_kv_len=self._max_seq_len,
        )

    def tokens(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions, int64 [size] each, of steps of `size` rows."""
        return self.tokens_S[:size], self.packed[size : 2 * size]

    def clear(self, size: int) -> None:
        """A step of padding only."""
        self.packed.zero_()
        self.packed[2 * size : 3 * size] = self._table.padding_row

    def send(self, arrays: StepArrays, size: int) -> torch.Tensor:
        """Start copying a step of at most `size` requests; gives their rows of the page table, on the device."""
        used = len(arrays.rows_B)
        packed = np.zeros(4 * size + 1, dtype=np.int64)
        packed[:used] = arrays.ids_T
        packed[size : size + used] = arrays.positions_T
        packed[2 * size : 3 * size] = self._table.padding_row
        packed[2 * size : 2 * size + used] = arrays.rows_B
        packed[3 * size : 3 * size + used] = arrays.kv_lens_B
        packed[-1] = used
        host = torch.from_numpy(packed)
        on_cuda = self.device.type == "cuda"
        self.packed[: len(packed)].copy_(host.pin_memory() if on_cuda else host, non_blocking=on_cuda)
        return self.packed[2 * size : 2 * size + used]

    def prepare(self, size: int) -> None:
        """Derive everything from the packed array of a step of `size` rows. Capturable; one launch on CUDA."""
        if HAS_TRITON and self.device.type == "cuda":
            self.launch(size)
            return
        table = self._table
        parts = self.packed[: 4 * size + 1].split([size, size, size, size, 1])
        ids_S, positions_S, rows_S, kv_lens_S, num_valid = parts
        self.num_valid.copy_(num_valid)
        self.kv_lens_S[:size] = kv_lens_S
        self.page_table_SP[:size] = table.pages_RP[rows_S]
        self.write_slots_S[:size] = table.write_slots(rows_S, positions_S)
        self.tokens_S[:size] = table.tokens(ids_S, rows_S)

    def launch(self, size: int) -> None:
        """`prepare` by the kernel."""
        table = self._table
        kernels.decode_inputs_kernel[(size, -(-table.max_pages // PAGES_BLOCK))](
            self.packed,
            table.pages_RP,
            table.last_R,
            self.tokens_S,
            self.kv_lens_S,
            self.write_slots_S,
            self.page_table_SP,
            self.num_valid,
            size,
            table.max_pages,
            PAGE_SIZE=table.page_size,
            BLOCK=PAGES_BLOCK,
        )
