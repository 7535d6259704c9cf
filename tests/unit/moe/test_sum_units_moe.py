"""When the grouped kernels want sums of rows for int4: where scales are applied to products, and steps divide K."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from minisgl.moe.base import ExpertShape, Problem
from minisgl.moe.kernels.launch import SumUnits, sum_units
from minisgl.moe.select import Choice, Tiles

SHAPE = ExpertShape(model_dim=256, hidden_dim=384)
PROBLEM = Problem(64, 4, 16, SHAPE, "int4", torch.bfloat16, group_size=128)


@pytest.mark.parametrize(
    ("group", "block_m", "up", "down", "expected"),
    [
        (128, 16, Tiles(128, 128, 4), Tiles(128, 128, 4), SumUnits(128, 64)),
        (128, 16, Tiles(32, 64, 4), Tiles(128, 128, 4), SumUnits(64, 32)),
        (64, 16, Tiles(64, 128, 4), Tiles(64, 64, 4), SumUnits(0, 64)),  # a step covers two groups
        (128, 16, Tiles(64, 128, 4), Tiles(64, 256, 4), SumUnits(128, 0)),
        (128, 32, Tiles(64, 128, 4), Tiles(64, 128, 4), SumUnits()),  # too many registers
    ],
)
def test_sums_where_scales_are_applied_late(group, block_m, up, down, expected):
    assert sum_units(replace(PROBLEM, group_size=group), Choice("grouped", block_m, up, down)) == expected


def test_no_sums_for_other_formats_and_kernels():
    tiles = Tiles(64, 128, 4)
    int8 = replace(PROBLEM, format="int8", group_size=0)
    assert sum_units(int8, Choice("grouped", 16, tiles, tiles)) == SumUnits()
    assert sum_units(PROBLEM, Choice("direct", 1, tiles, tiles)) == SumUnits()


def test_a_tail_of_k_has_no_sums():
    shape = ExpertShape(model_dim=320, hidden_dim=384)
    problem = replace(PROBLEM, shape=shape, group_size=64)
    tiles = Tiles(64, 64, 4)
    assert sum_units(problem, Choice("grouped", 16, replace(tiles, block_k=64), tiles)) == SumUnits(64, 64)
    problem = replace(problem, group_size=128)
    assert sum_units(problem, Choice("grouped", 16, replace(tiles, block_k=128), tiles)).x == 0
