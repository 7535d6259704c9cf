"""A rank's part of a quantized weight: cut where bits allow it, from the dequantized weight where they don't."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.models.checkpoints.base import collect
from minisgl.models.checkpoints.files import read_headers
from minisgl.models.checkpoints.placing import (
    Changes,
    put_dense,
    put_expert,
    read_dense,
    read_expert_weight,
)
from minisgl.models.checkpoints.recognise import find_encodings
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import get_format
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.shard import ExpertShard
from minisgl.parallel import Shard
from tests.checkpoint_writers import awq_config, awq_encoder, encode_fp8, gptq_config, gptq_encoder

MODEL, HIDDEN, EXPERTS = 128, 256, 3
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CASES = {
    "gptq": (gptq_encoder(32), gptq_config(32), "int4", 32),
    "awq": (awq_encoder(64), awq_config(64), "int4_asym", 64),
    "fp8": (encode_fp8, FP8, "fp8_block", 128),
}
PARTS = {"gate": (HIDDEN, MODEL), "up": (HIDDEN, MODEL), "down": (MODEL, HIDDEN)}


def written(folder: Path, encode, config):
    """(weights by name, meant weights by name)."""
    generator, tensors, meant = torch.Generator().manual_seed(0), {}, {}
    for expert in range(EXPERTS):
        for part, shape in PARTS.items():
            pieces, value = encode(f"{expert}.{part}", torch.randn(shape, generator=generator) * 0.1)
            tensors |= {name: piece.contiguous() for name, piece in pieces.items()}
            meant[f"{expert}.{part}"] = value
    save_file(tensors, folder / "model.safetensors")
    return collect(read_headers(folder), find_encodings(config)), meant


def filled(weights, shard: ExpertShard, weight_format, changes: Changes) -> ResidentStore:
    store = ResidentStore(len(shard.experts), ExpertShape(MODEL, shard.hidden.length), weight_format, "cpu")
    for weight in weights:
        number, part, _ = weight.name.split(".")
        if not shard.is_elsewhere(int(number)):
            pieces = read_expert_weight(weight, part, shard)
            put_expert(store, shard, (part, int(number)), weight, pieces, changes)
    assert not store.missing()
    return store


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2])
def test_ranks_share_every_expert(tmp_path: Path, case: str, count: int) -> None:
    encode, config, name, group_size = CASES[case]
    weights, meant = written(tmp_path, encode, config)
    for index in range(count):
        shard, changes = ExpertShard(EXPERTS, tuple(range(EXPERTS)), Shard(HIDDEN, index, count)), Changes()
        store = filled(weights, shard, get_format(name, group_size=group_size), changes)
        assert not changes.reasons
        rows = slice(shard.hidden.start, shard.hidden.stop)
        for expert in range(EXPERTS):
            gate_up = torch.cat([meant[f"{expert}.{part}"][rows] for part in ("gate", "up")])
            assert torch.equal(store.weight("gate_up")[expert], gate_up)
            assert torch.equal(store.weight("down")[expert], meant[f"{expert}.down"][:, rows])


def test_a_rank_whose_part_ends_in_a_block_quantizes_anew(tmp_path: Path) -> None:
    weights, meant = written(tmp_path, encode_fp8, FP8)
    shard, changes = ExpertShard(EXPERTS, tuple(range(EXPERTS)), Shard(HIDDEN, 1, 4)), Changes()
    store = filled(weights, shard, get_format("fp8_block"), changes)
    (((reason, target), count),) = changes.reasons.items()
    assert "ends inside of a block" in reason and target == "fp8_block" and count == 9
    expected = meant["2.down"][:, 64:128]
    assert (store.weight("down")[2] - expected).norm() < 0.04 * expected.norm()


def test_a_rank_of_whole_experts_takes_its_own(tmp_path: Path) -> None:
    encode, config, name, group_size = CASES["gptq"]
    weights, meant = written(tmp_path, encode, config)
    store = filled(
        weights, ExpertShard(EXPERTS, (2,), Shard(HIDDEN)), get_format(name, group_size=group_size), Changes()
    )
    assert torch.equal(store.weight("down")[0], meant["2.down"])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_dense_weights_are_cut_after_dequantizing(tmp_path: Path, case: str, dim: int) -> None:
    encode, config, *_ = CASES[case]
    weights, meant = written(tmp_path, encode, config)
    (weight,) = [w for w in weights if w.name == "1.up.weight"]
    shard = Shard(weight.shape[dim], 2, 3)  # parts of 86 rows or 43 columns, the last one shorter
    shape = list(weight.shape)
    shape[dim] = shard.width
    place = torch.zeros(shape)
    put_dense(place, (dim, shard), weight, read_dense(weight, (dim, shard)))
    expected = meant["1.up"].narrow(dim, shard.start, shard.length)
    assert torch.equal(place.narrow(dim, 0, shard.length), expected)
