"""Ids of a rank's own experts: the kernel against `Reduce.local_ids`, with replicas, without, and with routes to nobody."""

from __future__ import annotations

import pytest
import torch

from minisgl.moe.exchange.reduce import Reduce
from minisgl.moe.kernels.local_ids import local_ids
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import PlannedGroup

CPU = torch.device("cpu")


class OneOf(PlannedGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(size)
        self.rank = rank


@pytest.mark.parametrize("kind", ["contiguous", "round-robin"])
@pytest.mark.parametrize("replicated", [(), (1,), (0, 5, 11)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 90])
def test_kernel_equals_definition(kind, replicated, num_tokens):
    spread = ExpertSpread(12, 3, kind, replicated)
    ids_TK = torch.randint(-1, 12, (num_tokens, 4), dtype=torch.int32)
    held = 0
    for rank in range(3):
        exchange, tables = Reduce(spread, OneOf(rank, 3), CPU), spread.tables(rank, CPU)
        found = local_ids(ids_TK, tables.owned_E1, tables.home_E1, rank, 3, bool(replicated))
        assert found.dtype == torch.int32
        assert torch.equal(found, exchange.local_ids(ids_TK))
        held += int((found >= 0).sum())
    assert held == int((ids_TK >= 0).sum()), "every route is computed by exactly one rank"
