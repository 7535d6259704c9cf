"""Loading experts in every way a checkpoint may hold them, and what a store says when something is wrong."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.base import ExpertShape, Routing
from minisgl.moe.formats import get_format, moe_quantization_choices
from minisgl.moe.store import ResidentStore, StoreBytes
from minisgl.moe.store import records as records_module
from tests.moe_oracle import relative_error

E, D, F = 3, 64, 96
each_format = pytest.mark.parametrize("name", moe_quantization_choices)


def make_store(
    name: str = "none", *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> ResidentStore:
    return ResidentStore(E, ExpertShape(D, F, bias), get_format(name, dtype, group_size=32), "cpu")


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(E, 2 * F, D), torch.randn(E, D, F)


@each_format
def test_every_way_of_loading_gives_the_same_bytes(name: str) -> None:
    (gate_up, down), biases = weights(), (torch.randn(E, 2 * F), torch.randn(E, D))
    fused, single, stored = (make_store(name, bias=True) for _ in range(3))
    for store in (fused, single, stored):
        store.records_EB.zero_()
    for part, tensor in {
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": biases[0],
        "down_bias": biases[1],
    }.items():
        fused.sink(None, part, tensor)
    for expert in (2, 0, 1):
        single.sink(expert, "up", gate_up[expert, F:])
        single.sink(expert, "down", down[expert])
        single.sink(expert, "gate", gate_up[expert, :F])
        single.sink(expert, "down_bias", biases[1][expert])
        single.sink(expert, "up_bias", biases[0][expert, F:])
        single.sink(expert, "gate_bias", biases[0][expert, :F])
    for expert in range(E):
        stored.sink_parts(expert, {part: tensor[expert] for part, tensor in fused.parts.items()})
    assert fused.missing() == single.missing() == stored.missing() == []
    assert torch.equal(fused.records_EB, single.records_EB)
    assert torch.equal(fused.records_EB, stored.records_EB)
    meant = fused.format.dequantize("down", fused.format.quantize("down", down))
    assert torch.equal(fused.weight("down"), meant)


def test_large_layers_are_quantized_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, _ = weights()
    whole, chunked = make_store("int8"), make_store("int8")
    whole.sink(None, "gate_up", gate_up)
    monkeypatch.setattr(records_module, "CHUNK_WEIGHTS", 2 * 2 * F * D)
    chunked.sink(None, "gate_up", gate_up)
    assert torch.equal(whole.weight("gate_up"), chunked.weight("gate_up"))


def test_low_precision_checkpoint_keeps_its_bits() -> None:
    store = make_store(dtype=torch.bfloat16)
    down = torch.randn(E, D, F).bfloat16()
    store.sink(None, "down", down)
    assert torch.equal(store.parts["down"], down)


def test_missing_is_named() -> None:
    store = make_store("fp8", bias=True)
    assert store.missing()[0] == "all experts: gate"
    gate_up, down = weights()
    store.sink(None, "down", down)
    store.sink(None, "down_bias", torch.zeros(E, D))
    store.sink(None, "gate_up_bias", torch.zeros(E, 2 * F))
    store.sink(0, "gate_up", gate_up[0])
    store.sink(1, "gate", gate_up[1, :F])
    store.sink_parts(2, {"gate": torch.zeros(F, D, dtype=torch.float8_e4m3fn)})
    assert store.missing() == [
        "expert 1: up",
        "expert 2: up",
        "expert 2: gate_scale",
        "expert 1: up_scale",
        "expert 2: up_scale",
    ]


@pytest.mark.parametrize(
    ("expert", "name", "shape", "message"),
    [
        (1, "gate", (F, D + 1), r"expert 1, 'gate': .* \[96, 64\], found torch.float32 \[96, 65\]"),
        (1, "down", (F, D), r"expert 1, 'down': expected shape \[64, 96\]"),
        (None, "down", (E, F, D), r"all experts, 'down': expected shape \[64, 96\] after a leading 3"),
        (None, "gate_up", (E + 1, 2 * F, D), "leading dim of 3 experts"),
        (3, "gate", (F, D), r"expert 3 doesn't exist: the layer has 0\.\.2"),
        (0, "w1", (F, D), r"no 'w1', only gate, up, gate_up, down"),
        (0, "down_bias", (D,), r"no 'down_bias'"),
    ],
)
def test_misshapen_tensors(expert: int | None, name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_store("int8").sink(expert, name, torch.zeros(shape))


def test_integers_are_no_weights() -> None:
    with pytest.raises(ValueError, match=r"'down': expected a float tensor, found torch.int8"):
        make_store().sink(0, "down", torch.zeros(D, F, dtype=torch.int8))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("lead", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("tail", [(), (1,), (D,), (D, 1)], ids=str)
def test_channel_scales_in_every_shape(name: str, lead: bool, tail: tuple[int, ...]) -> None:
    """One distinct value an expert, so that a scale taken from the wrong expert shows."""
    store, codes = make_store(name), torch.ones(E, D, F)
    codes = codes.to(store.parts["down"].dtype)
    scales = torch.tensor([2.0, 3.0, 5.0]).view(E, *[1] * len(tail)).expand(E, *tail)
    if lead:
        store.sink_parts(None, {"down": codes, "down_scale": scales})
    else:
        for expert in range(E):
            store.sink_parts(expert, {"down": codes[expert], "down_scale": scales[expert]})
    assert torch.equal(store.weight("down"), torch.tensor([2.0, 3.0, 5.0]).view(E, 1, 1).expand(E, D, F))


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("fp8", {"down_scale": torch.zeros(D + 1)}, r"'down_scale': expected shape \[64\]"),
        ("fp8", {"down_scale": torch.zeros(1, D)}, r"'down_scale': expected shape \[64\]"),
        ("fp8", {"gate_scale": torch.zeros(D)}, r"'gate_scale': expected shape \[96\]"),
        ("fp8", {"down_zero": torch.zeros(D)}, "fp8 experts have no part 'down_zero'"),
        ("fp8", {"down": torch.zeros(D, F)}, "expected dtype torch.float8_e4m3fn"),
        ("fp8_block", {"down_scale": torch.zeros(())}, r"'down_scale': expected shape \[1, 1\]"),
        ("int4", {"down_scale": torch.zeros(D)}, r"'down_scale': expected shape \[64, 3\]"),
        ("int4", {"down": torch.zeros(D, F, dtype=torch.uint8)}, r"'down': expected shape \[64, 48\]"),
        ("mxfp4", {"down_scale": torch.zeros(D, 3)}, "expected dtype torch.uint8"),
    ],
)
def test_wrong_parts_are_refused_by_name(name: str, parts: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_store(name).sink_parts(0, parts)


@each_format
def test_random_weights_are_valid_and_repeatable(name: str) -> None:
    first, second, other = (make_store(name, bias=True) for _ in range(3))
    for store, seed in ((first, 7), (second, 7), (other, 8)):
        store.records_EB.zero_()
        store.fill_random(seed, std=0.02)
    assert first.missing() == []
    assert torch.equal(first.records_EB, second.records_EB)
    assert not torch.equal(first.records_EB, other.records_EB)
    for part in ("gate_up", "down"):
        assert first.weight(part).std().item() == pytest.approx(0.02, rel=0.1)
        assert not torch.equal(first.weight(part)[0], first.weight(part)[1])


def test_resident_store_serves_in_one_wave() -> None:
    store = make_store("fp8")
    routing = Routing(torch.tensor([[0, 2], [-1, 1]], dtype=torch.int32), torch.full((2, 2), 0.5))
    (placement,) = store.place(routing)
    assert torch.equal(placement.slots_TK, routing.ids_TK)
    assert placement.slab.num_slots == store.num_slots == E
    assert store.graph_safe(1)
    assert store.graph_safe(100_000)
    assert store.bytes() == StoreBytes(device=E * store.format.bytes_per_expert(store.shape))


def test_shape_the_format_cannot_store() -> None:
    with pytest.raises(ValueError, match=r"F=96 .*group size 32 works"):
        ResidentStore(E, ExpertShape(D, F), get_format("int4", group_size=64), "cpu")


def test_loading_does_not_keep_the_checkpoint() -> None:
    store, (_, down) = make_store(), weights()
    store.sink(None, "down", down)
    kept = store.weight("down").clone()
    down.zero_()
    assert relative_error(store.weight("down"), kept) == 0.0
