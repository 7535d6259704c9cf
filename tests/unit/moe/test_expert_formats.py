"""Each format against its own promise: what a value becomes, what it costs, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.moe.base import ExpertShape, Slab
from minisgl.moe.formats import ExpertFormat, get_format, moe_quantization_choices
from minisgl.moe.formats.mxfp4 import TABLE, pack_codes, unpack_codes
from tests.moe_oracle import relative_error

FORMATS: dict[str, ExpertFormat] = {
    "bf16": get_format("bf16"),
    "fp16": get_format("fp16"),
    "fp32": get_format("fp32"),
    "int8": get_format("int8"),
    "fp8": get_format("fp8"),
    "fp8_block": get_format("fp8_block"),
    "int4 g128": get_format("int4", group_size=128),
    "int4 g64": get_format("int4", group_size=64),
    "int4 g32": get_format("int4", group_size=32),
    "int4 g32 asymmetric": get_format("int4", group_size=32, symmetric=False),
    "mxfp4": get_format("mxfp4"),
}
QUANTIZED = [name for name in FORMATS if name not in ("bf16", "fp16", "fp32")]
# Largest relative error of normally distributed weights; a step of uniform codes is amax / levels and its rms
# error step / sqrt(12), with amax about 3 to 3.7 sigma in rows of 256.
ROUND_TRIP = {
    "bf16": 2e-3,
    "fp16": 3e-4,
    "fp32": 0.0,
    "int8": 9e-3,
    "fp8": 3e-2,
    "fp8_block": 3e-2,
    "int4 g128": 0.11,
    "int4 g64": 0.10,
    "int4 g32": 0.09,
    "int4 g32 asymmetric": 0.085,
    "mxfp4": 0.125,
}

each_format = pytest.mark.parametrize("name", FORMATS)
each_quantized = pytest.mark.parametrize("name", QUANTIZED)


def round_trip(weight_format: ExpertFormat, weight: torch.Tensor, name: str = "down") -> torch.Tensor:
    return weight_format.dequantize(name, weight_format.quantize(name, weight))


@each_format
def test_round_trip_error(name: str) -> None:
    weight = torch.randn(3, 192, 256)
    assert relative_error(round_trip(FORMATS[name], weight), weight) <= ROUND_TRIP[name]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"fp16"}))  # float16 itself can't hold such weights
@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_round_trip_error_whatever_the_scale(name: str, scale: float) -> None:
    weight = torch.randn(3, 192, 256) * scale
    assert relative_error(round_trip(FORMATS[name], weight), weight) <= ROUND_TRIP[name]


@each_format
def test_what_was_stored_is_stored_again(name: str) -> None:
    weight = torch.randn(2, 160, 256)
    once = FORMATS[name].quantize("down", weight)
    again = FORMATS[name].quantize("down", FORMATS[name].dequantize("down", once))
    for part in once:
        if once[part].dtype == torch.float32:
            torch.testing.assert_close(again[part], once[part], rtol=3e-7, atol=0)
        else:
            assert torch.equal(again[part].float(), once[part].float()), part


@each_format
def test_zeros_stay_zeros(name: str) -> None:
    weight = torch.randn(64, 128)
    weight[5], weight[:, 64:] = 0.0, 0.0
    restored = round_trip(FORMATS[name], weight)
    assert not restored[5].any()
    assert not restored[:, 64:].any() or name == "int4 g128"  # there the zeros share a group with others
    assert not round_trip(FORMATS[name], torch.zeros(64, 128)).any()


@each_quantized
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused(name: str, bad: float) -> None:
    weight = torch.randn(2, 64, 128)
    weight[1, 3, 7] = bad
    with pytest.raises(ValueError, match="'down' holds NaN or inf"):
        FORMATS[name].quantize("down", weight)


def test_native_formats_keep_nan() -> None:
    weight = torch.tensor([[1.0, math.nan]])
    assert round_trip(FORMATS["bf16"], weight).isnan().tolist() == [[False, True]]


@each_format
@pytest.mark.parametrize("hidden", [128, 192, 320, 704])
def test_gate_and_up_may_come_one_by_one(name: str, hidden: int) -> None:
    weight_format, weight = FORMATS[name], torch.randn(2 * hidden, 128)
    whole = weight_format.quantize("gate_up", weight)
    gate = weight_format.quantize("gate", weight[:hidden])
    up = weight_format.quantize("up", weight[hidden:])
    for part, stored in whole.items():
        suffix = part.removeprefix("gate_up")
        halves = torch.cat([gate["gate" + suffix].float(), up["up" + suffix].float()])
        assert torch.equal(stored.float(), halves), part


@each_format
def test_layout_matches_what_quantize_returns(name: str) -> None:
    weight_format, shape = FORMATS[name], ExpertShape(128, 384, bias=True)
    layout = weight_format.layout(shape)
    parts = {part.name: part for part in layout.parts}
    stored = weight_format.quantize("gate_up", torch.randn(768, 128))
    stored |= weight_format.quantize("down", torch.randn(128, 384))
    stored |= {"gate_up_bias": torch.zeros(768), "down_bias": torch.zeros(128)}
    assert {part: (tuple(t.shape), t.dtype) for part, t in stored.items()} == {
        part.name: (part.shape, part.dtype) for part in layout.parts
    }
    ends = [part.offset + math.prod(part.shape) * part.dtype.itemsize for part in layout.parts]
    starts = [part.offset for part in layout.parts[1:]] + [layout.nbytes]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert all(part.offset % 16 == 0 for part in layout.parts)
    assert layout.nbytes % 256 == 0
    assert len(parts) == len(layout.parts)


@each_format
def test_views_reach_every_record(name: str) -> None:
    weight_format, shape = FORMATS[name], ExpertShape(128, 128, bias=True)
    layout = weight_format.layout(shape)
    records = torch.full((3, layout.nbytes), 0xFF, dtype=torch.uint8)
    slab = Slab.of_records(weight_format.name, shape, layout, records)
    weights = torch.randn(3, 128, 128)
    for part, stored in weight_format.quantize("down", weights).items():
        slab.parts[part].copy_(stored)
    restored = weight_format.dequantize("down", slab.parts)
    assert torch.equal(restored, round_trip(weight_format, weights))
    padding = layout.nbytes - layout.parts[-1].offset - 4 * 128
    assert padding == 0 or bool((records[:, -padding:] == 0xFF).all())
    assert slab.num_slots == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", 9_437_184),
        ("fp8", 4_732_928),
        ("int8", 4_732_928),
        ("fp8_block", 4_718_592 + 2 * 6 * 16 * 4 + 16 * 6 * 4),
        ("int4 g128", 2_359_296 + 147_456),
        ("mxfp4", 2_359_296 + 147_456),
    ],
)
def test_bytes_of_a_qwen3_30b_expert(name: str, expected: int) -> None:
    assert 0 <= FORMATS[name].bytes_per_expert(ExpertShape(2048, 768)) - expected < 256


@pytest.mark.parametrize("shape", [(48, 704), (80, 80), (130, 320), (1, 1)])
def test_block_scales_of_odd_sizes(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    parts = FORMATS["fp8_block"].quantize("down", weight)
    restored = FORMATS["fp8_block"].dequantize("down", parts)
    for n in range(0, shape[0], 128):
        for k in range(0, shape[1], 128):
            block = weight[n : n + 128, k : k + 128]
            torch.testing.assert_close(
                parts["down_scale"][n // 128, k // 128], block.abs().max() / 448, rtol=1e-6, atol=0
            )
            error = (restored[n : n + 128, k : k + 128] - block).abs()
            assert bool((error <= block.abs() / 16 + parts["down_scale"][n // 128, k // 128] * 2**-9).all())


def test_up_rows_use_their_own_blocks() -> None:
    """F = 192 on disk: gate and up have two rows of blocks each, the second of 64 rows."""
    gate, up = torch.full((192, 128), 1.0), torch.full((192, 128), 64.0)
    parts = FORMATS["fp8_block"].quantize("gate_up", torch.cat([gate, up]))
    assert parts["gate_up_scale"].shape == (4, 1)
    torch.testing.assert_close(parts["gate_up_scale"].flatten() * 448, torch.tensor([1.0, 1.0, 64.0, 64.0]))
    assert torch.equal(FORMATS["fp8_block"].dequantize("gate_up", parts), torch.cat([gate, up]))


@pytest.mark.parametrize("scale", [0, 100, 127, 130, 254])
def test_mxfp4_means_the_table(scale: int) -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    parts = {"down": pack_codes(codes), "down_scale": torch.tensor([[scale]], dtype=torch.uint8)}
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    expected = torch.tensor([[value * 2.0 ** (scale - 127) for value in values]])
    assert torch.equal(FORMATS["mxfp4"].dequantize("down", parts), expected)


def test_mxfp4_codes_lie_where_kernels_want_them() -> None:
    codes = torch.randint(0, 16, (3, 5, 64), dtype=torch.uint8)
    packed = pack_codes(codes)
    assert torch.equal(unpack_codes(packed), codes)
    one = torch.zeros(1, 32, dtype=torch.uint8)
    for number, bits in enumerate(
        (0b1000_0001_1100_0000, 0b10_0000_0011_1000, 0b10_0000_0111, 0b101_1100_0000_0000)
    ):
        one.zero_()[0, 8 * number + 3] = 15
        words = pack_codes(one).view(torch.int16)[0].tolist()
        assert words.pop(3) & 0xFFFF == bits
        assert not any(words)


def test_mxfp4_scale_255_is_nan() -> None:
    parts = {
        "down": torch.zeros(1, 16, dtype=torch.uint8),
        "down_scale": torch.tensor([[255]], dtype=torch.uint8),
    }
    assert bool(FORMATS["mxfp4"].dequantize("down", parts).isnan().all())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-8, 8, width=16), min_size=31, max_size=31))
def test_mxfp4_rounds_to_the_nearest_even(values: list[float]) -> None:
    block = torch.tensor([[*values, 4.0]])  # 4 to 8 as the largest magnitude make the scale 1
    if block.abs().max() >= 8:
        return
    restored = round_trip(FORMATS["mxfp4"], block)[0].tolist()
    for value, found in zip(block[0].tolist(), restored, strict=True):
        by_distance = sorted(range(16), key=lambda code: (abs(TABLE[code] - value), code % 2))
        assert found == TABLE[by_distance[0]]


def test_int4_uses_all_sixteen_codes() -> None:
    values = torch.arange(-8, 8).float().repeat(2)[None]
    assert torch.equal(round_trip(FORMATS["int4 g32"], values), values)
    assert torch.equal(round_trip(FORMATS["int4 g32"], -values), -values)
    shifted = torch.arange(-3, 13).float().repeat(2)[None]
    assert torch.equal(round_trip(FORMATS["int4 g32 asymmetric"], shifted), shifted)
    assert torch.equal(round_trip(FORMATS["int4 g32 asymmetric"], shifted + 3), shifted + 3)


def test_dequantize_needs_no_settings() -> None:
    """A slab says "int4" and its parts say the rest."""
    for name in (key for key in FORMATS if key.startswith("int4")):
        parts = FORMATS[name].quantize("down", torch.randn(4, 128))
        assert torch.equal(
            get_format("int4").dequantize("down", parts), FORMATS[name].dequantize("down", parts)
        )


@pytest.mark.parametrize(
    ("name", "model_dim", "hidden_dim", "words"),
    [
        ("int4 g128", 2048, 704, ["F=704", "group size 128", "group size 64 works"]),
        ("int4 g128", 2880, 2880, ["D=2880", "group size 64 works"]),
        ("int4 g64", 2048, 96, ["F=96", "group size 32 works"]),
        ("int4 g32", 2048, 48, ["F=48", "int8, fp8 and fp8_block take any shape"]),
        ("mxfp4", 2048, 80, ["F=80", "multiple of 32", "take any shape"]),
    ],
)
def test_shapes_that_do_not_fit(name: str, model_dim: int, hidden_dim: int, words: list[str]) -> None:
    shape = ExpertShape(model_dim, hidden_dim)
    reason = FORMATS[name].check(shape)
    assert reason is not None
    assert all(word in reason for word in words), reason
    with pytest.raises(ValueError, match="multiple of"):
        FORMATS[name].layout(shape)


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "fp8_block"])
@pytest.mark.parametrize("hidden_dim", [1, 48, 80, 96, 192, 704])
def test_shapes_that_fit(name: str, hidden_dim: int) -> None:
    assert FORMATS[name].check(ExpertShape(320, hidden_dim)) is None


def test_formats_by_name() -> None:
    for choice in moe_quantization_choices:
        weight_format = get_format(choice, torch.float16)
        assert weight_format.name == ("fp16" if choice == "none" else choice)
        assert get_format(choice, torch.float16) is weight_format
    with pytest.raises(ValueError, match=r"'int3'.*none, int8"):
        get_format("int3")
    with pytest.raises(ValueError, match="group size must be"):
        get_format("int4", group_size=16)
    with pytest.raises(ValueError, match="float64"):
        get_format("none", torch.float64)


def test_views_of_records_that_are_a_slice_of_something_larger() -> None:
    """A slab may be part of one allocation; its views must not start at the allocation's beginning."""
    shape = ExpertShape(64, 64)
    weight_format = get_format("int8")
    layout = weight_format.layout(shape)
    whole = torch.zeros((5, layout.nbytes), dtype=torch.uint8)
    slab = Slab.of_records(weight_format.name, shape, layout, whole[2:4])
    for part in slab.parts.values():
        part.fill_(1)
    assert not bool(whole[:2].any()) and not bool(whole[4:].any())
    assert bool(whole[2:4].any(1).all())
