"""fp8 dense layers: what they mean, which way is taken, torch._scaled_mm's arguments (it runs on CPUs too), merged parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.layers import fp8
from minisgl.layers.embedding import Embedding, LmHead
from minisgl.layers.fp8 import (
    Fp8Storage,
    Fp8Weight,
    choose_way,
    dequantized_linear,
    fp8_linear,
    scaled_linear,
)
from minisgl.layers.linear import Linear, MergedLinear
from minisgl.parallel import Shard

CPU = torch.device("cpu")


def new_weight(num_rows: int, num_cols: int, group: int = 0) -> Fp8Weight:
    storage = Fp8Storage(group)
    codes = torch.empty(num_rows, num_cols, dtype=torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.empty(num_rows, storage.num_groups(num_cols)), group or num_cols)


def filled(num_rows: int, num_cols: int, group: int = 0) -> tuple[Fp8Weight, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    plain = torch.randn(num_rows, num_cols, generator=generator)
    plain *= torch.logspace(-2, 2, num_rows)[:, None]  # rows of very different size
    weight = new_weight(num_rows, num_cols, group)
    weight.quantize(plain)
    return weight, plain


@pytest.mark.parametrize(("cols", "group"), [(96, 0), (96, 32), (100, 32), (7, 0), (33, 16)])
def test_every_group_uses_its_whole_range(cols: int, group: int) -> None:
    weight, plain = filled(24, cols, group)
    size = group or cols
    for start in range(0, cols, size):
        part = plain[:, start : start + size]
        scale = weight.scale_NG[:, start // size]
        torch.testing.assert_close(scale * 448, part.abs().amax(1))
        error = (weight.dequantize()[:, start : start + size] - part).abs()
        # e4m3 has 3 bits of mantissa: half a step is 1/16 of a normal value, or 2^-10 of a scale below
        assert bool((error <= part.abs() / 16 + scale[:, None] * 2**-10 + 1e-12).all())


def test_large_weights_are_quantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, plain = filled(40, 64)
    monkeypatch.setattr(fp8, "CHUNK", 7 * 64)
    pieces = new_weight(40, 64)
    pieces.quantize(plain)
    assert torch.equal(pieces.codes_NK.view(torch.uint8), whole.codes_NK.view(torch.uint8))
    assert torch.equal(pieces.scale_NG, whole.scale_NG)
    x = torch.randn(3, 64)
    torch.testing.assert_close(dequantized_linear(x, whole, None), F.linear(x, whole.dequantize()))


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight.*(NaN|inf|finite)"):
        new_weight(2, 4).quantize(torch.tensor([[1.0, 2, 3, 4], [1, float("nan"), 3, 4]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "bias"), [(0, True), (32, False)])
def test_the_definition_multiplies_what_the_codes_mean(dtype: torch.dtype, group: int, bias: bool) -> None:
    weight, _ = filled(48, 96, group)
    x = torch.randn(2, 3, 96).to(dtype)
    added = torch.randn(48).to(dtype) if bias else None
    y = fp8_linear(x, weight, added)
    exact = x.double() @ weight.dequantize().double().T + (0 if added is None else added.double())
    assert y.dtype == dtype and y.shape == (2, 3, 48)
    bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (y.double() - exact).norm() < bound * exact.norm()


def test_scaled_products_add_the_error_of_an_fp8_row() -> None:
    weight, _ = filled(48, 96)
    x = torch.randn(5, 96).bfloat16() * torch.tensor([1e-3, 1.0, 1e3, 0.0, 1.0])[:, None].bfloat16()
    bias = torch.randn(48).bfloat16()
    y, exact = scaled_linear(x, weight, bias), dequantized_linear(x, weight, bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y[3], exact[3]), "a row of zeros is exact"
    for row in (0, 1, 2, 4):  # each has a scale of its own
        without = exact[row].double() - bias.double()
        assert (y[row].double() - exact[row].double()).norm() < 0.05 * without.norm() + 0.01 * exact[
            row
        ].norm()


def test_which_way() -> None:
    by_row, grouped = new_weight(64, 128), new_weight(64, 128, 64)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert choose_way(4, by_row, bf16, has_fp8=False) == "dequantize"
    assert {choose_way(m, w, t, True) for m in (1, 16) for w in (by_row, grouped) for t in (bf16, fp16)} == {
        "kernel"
    }
    assert choose_way(17, by_row, bf16, True) == "scaled_mm"
    assert choose_way(17, by_row, fp16, True) == choose_way(17, grouped, bf16, True) == "dequantize"
    assert choose_way(4, by_row, fp32, True) == choose_way(0, by_row, bf16, True) == "dequantize"
    assert choose_way(17, new_weight(60, 128), bf16, True) == "dequantize", "_scaled_mm wants multiples of 16"
    assert choose_way(4, new_weight(64, 120, 24), bf16, True) == "dequantize", "no block of columns fits"


def test_merged_parts_are_views() -> None:
    parts = {"q": Shard(4), "k": Shard(2), "v": Shard(3)}
    merged = MergedLinear(32, parts, bias=True, device=CPU, dtype=torch.float32, fp8=Fp8Storage(16))
    places, weights = merged.places(), merged.fp8_weights()
    assert sorted(weights) == ["k.weight", "q.weight", "v.weight"] and set(places) > set(weights)
    plain = torch.randn(9, 32)
    for name, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 9))):
        assert places[f"{name}.weight"].dtype == torch.float8_e4m3fn
        weights[f"{name}.weight"].quantize(plain[rows])
        places[f"{name}.bias"].fill_(1.0)
    whole = merged.fp8_weight()
    assert whole is not None
    x = torch.randn(2, 32)
    torch.testing.assert_close(merged(x), x @ whole.dequantize().T + 1)


def test_plain_layers_have_no_codes() -> None:
    linear = Linear(8, 4, device=CPU, dtype=torch.float32)
    assert linear.fp8_weights() == {} and list(linear.places()) == ["weight"]
    tied = LmHead(
        8, 4, tied_to=Embedding(8, 4, device=CPU, dtype=torch.float32), device=CPU, dtype=torch.float32
    )
    assert tied.fp8_weights() == {}
