"""One launch that prepares a decode step, in the interpreter: equal to the torch code, nothing else written."""

from __future__ import annotations

import pytest
import torch
import triton

from minisgl.engine import inputs
from minisgl.engine.inputs import DecodeInputs, PageTable, step_arrays
from minisgl.engine.step import Chunk

CPU = torch.device("cpu")
ROWS, MAX_LEN = 6, 200
POISON = -77


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
    monkeypatch.setattr(inputs, "PAGES_BLOCK", 8)


def make_table(page_size: int) -> PageTable:
    generator = torch.Generator().manual_seed(page_size)
    table = PageTable(ROWS, MAX_LEN, page_size, CPU)
    table.pages_RP[:-1] = torch.randint(1, 999, (ROWS, table.max_pages), generator=generator).int()
    table.last_R[:-1] = torch.randint(0, 5000, (ROWS,), generator=generator)
    return table


def poisoned(table: PageTable) -> DecodeInputs:
    made = DecodeInputs(8, table, MAX_LEN)
    for tensor in (made.tokens_S, made.kv_lens_S, made.write_slots_S, made.page_table_SP, made.num_valid):
        tensor.fill_(POISON)
    return made


def decode(row: int, position: int, token: int | None) -> Chunk:
    return Chunk(row, position, 1, None if token is None else [token], 0, [], None)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_kernel_equals_the_definition(page_size: int, size: int) -> None:
    chunks = [decode(4, 0, 11), decode(0, MAX_LEN - 1, None), decode(2, 64, None)]
    table = make_table(page_size)
    ours, expected = poisoned(table), poisoned(table)
    for candidate in (ours, expected):
        rows = candidate.send(step_arrays(chunks), size)
        assert rows.tolist() == [4, 0, 2]
    ours.launch(size)
    expected.prepare(size)
    for name in ("tokens_S", "kv_lens_S", "write_slots_S", "num_valid"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert ours.num_valid.item() == 3
    assert ours.tokens_S[1] == table.last_R[0]
    used = [1, -(-MAX_LEN // page_size), 64 // page_size + 1] + [0] * 5
    for row, count in enumerate(used):
        assert torch.equal(ours.page_table_SP[row, :count], expected.page_table_SP[row, :count])
        assert (ours.page_table_SP[row, count:] == POISON).all()


def test_padding_writes_to_the_dummy_page() -> None:
    made = poisoned(make_table(16))
    made.send(step_arrays([decode(1, 20, 5)]), 4)
    made.launch(4)
    assert made.kv_lens_S[:4].tolist() == [21, 0, 0, 0]
    assert made.write_slots_S[1:4].tolist() == [0, 0, 0]
    assert made.tokens_S[1:4].tolist() == [0, 0, 0]
    made.clear(4)
    made.launch(4)
    assert made.num_valid.item() == 0
    assert made.kv_lens_S[:4].tolist() == [0] * 4
    batch, (tokens, positions) = made.batch(4), made.tokens(4)
    assert batch.cu_q_B1.tolist() == [0, 1, 2, 3, 4]
    assert batch.page_table_BP.shape == (4, 13)
    assert tokens.shape == positions.shape == (4,)
