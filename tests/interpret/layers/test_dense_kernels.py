"""The kernels of fp8 weights and of an embedding in host memory, in the interpreter, against the layers' own torch code."""

from __future__ import annotations

import pytest
import torch
import triton

from minisgl.layers import embedding, fp8
from minisgl.layers.embedding import gather_rows
from minisgl.layers.fp8 import Fp8Storage, Fp8Weight, dequantized_linear, few_rows_linear


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
    empty = torch.empty

    def poisoned(*args, **options):
        out = empty(*args, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(fp8.torch, "empty", poisoned)
    monkeypatch.setattr(embedding.torch, "empty", poisoned)


@pytest.mark.parametrize(
    ("rows", "out_dim", "in_dim", "group"),
    [(1, 40, 256, 0), (16, 64, 100, 0), (3, 33, 256, 128), (5, 32, 200, 64), (2, 32, 80, 48)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_few_rows(rows: int, out_dim: int, in_dim: int, group: int, bias: bool) -> None:
    generator, storage = torch.Generator().manual_seed(in_dim), Fp8Storage(group)
    codes = torch.empty(out_dim, in_dim, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.zeros(out_dim, storage.num_groups(in_dim)), group or in_dim)
    plain = torch.randn(out_dim, in_dim, generator=generator)
    weight.quantize(plain * torch.logspace(-1, 1, out_dim)[:, None])
    x = torch.randn(rows, 2 * in_dim, generator=generator).half()[:, :in_dim]  # rows that are not neighbours
    added = torch.randn(out_dim, generator=generator).half() if bias else None
    y = few_rows_linear(x, weight, added)
    exact = dequantized_linear(x.double(), weight, None if added is None else added.double())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)
    if rows > 1:
        assert torch.equal(few_rows_linear(x[:1], weight, added), y[:1]), "a row's sum knows no other rows"


def test_quantized_rows() -> None:
    """Values that are codes times a power of two: the interpreter's own cast to fp8 is right for these."""
    scale = torch.tensor([1.0, 0.25, 2.0, 1.0])[:, None]
    codes = torch.randint(0, 126, (4, 100), generator=torch.Generator().manual_seed(0)).byte()
    codes[:, 7] = 0x7E  # 448
    values = codes.view(torch.float8_e4m3fn).float()
    values[3] = 0.0
    x = torch.zeros(4, 128, dtype=torch.float16)
    x[:, :100] = (values * scale).half()
    found, scales = fp8.quantize_rows(x[:, :100])
    torch.testing.assert_close(scales, scale)
    torch.testing.assert_close(found.float() * scales, x[:, :100].float())


@pytest.mark.parametrize("dim", [64, 100, 3000])
def test_rows_of_an_embedding(dim: int) -> None:
    table = torch.randn(11, dim)
    ids = torch.tensor([3, 0, 10, 3])
    assert torch.equal(gather_rows(table, ids), table[ids])
    assert gather_rows(table, ids[:0]).shape == (0, dim)
    assert torch.equal(gather_rows(table, ids.int()), table[ids])
