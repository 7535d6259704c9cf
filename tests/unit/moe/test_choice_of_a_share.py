"""A rank with a part of the experts chooses kernels for the rows its slots get, not for all routes of its tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.moe.base import ExpertShape, Problem
from minisgl.moe.records import Records, problem_key
from minisgl.moe.select import DeviceLimits, select

WHOLE = Problem(256, 8, 128, ExpertShape(2048, 768), "bf16", torch.bfloat16)
SHARE = replace(WHOLE, num_slots=64, num_experts=128)
H200 = DeviceLimits("NVIDIA H200", (9, 0), 232_448, 132)


@pytest.mark.parametrize("num_tokens", [1, 16, 256, 4096])
@pytest.mark.parametrize("name", ["bf16", "fp8", "int4"])
def test_half_of_the_experts_use_what_suits_all_of_them(num_tokens: int, name: str) -> None:
    whole, share = (replace(p, num_tokens=num_tokens, format=name) for p in (WHOLE, SHARE))
    assert share.rows_per_slot == whole.rows_per_slot
    assert select(share, H200) == select(whole, H200)


def test_a_record_of_all_experts_serves_a_share_until_it_has_its_own(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert problem_key(SHARE) != problem_key(WHOLE)
    measured = select(WHOLE, H200)
    records.add(WHOLE, H200, measured, 100.0)
    found = records.lookup(SHARE, H200)
    assert found is not None
    assert found[256] == measured
    own = replace(measured, block_m=64)
    records.add(SHARE, H200, own, 90.0)
    of_share, of_whole = records.lookup(SHARE, H200), records.lookup(WHOLE, H200)
    assert of_share is not None and of_whole is not None
    assert (of_share[256].block_m, of_whole[256].block_m) == (64, measured.block_m)
