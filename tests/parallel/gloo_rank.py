"""What one rank of a group over real Gloo checks; `test_gloo.py` forks a process a rank to run it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minisgl.config import EngineConfig
from minisgl.engine.ranks import ConnectedRanks
from minisgl.engine.step import Chunk, EngineLost
from minisgl.engine.wire import ELSEWHERE
from minisgl.moe.exchange import Local, make_exchange
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import Rendezvous, TorchGroup
from tests.unit.parallel.test_exchange import CPU, MODES, WEIGHTS, D, E, make_mode, make_routing, run_exchange


def collectives(group: TorchGroup) -> None:
    """Each method against its definition, in every dtype that is sent."""
    rank, size = group.rank, group.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        mine = [(torch.arange(6).view(2, 3) + 10 * r).to(dtype) for r in range(size)]
        assert torch.equal(group.all_reduce(mine[rank].clone()), sum(mine))
        assert torch.equal(group.all_gather(mine[rank], dim=0), torch.cat(mine))
        assert torch.equal(group.all_gather(mine[rank], dim=-1), torch.cat(mine, -1))
        assert torch.equal(group.broadcast(mine[rank].clone()), mine[0])
        rows = torch.full((sum(range(size)), 2), rank).to(dtype)  # d rows to rank d
        got = group.start_exchange(rows, list(range(size)), [rank] * size).wait()
        assert got[:, 0].tolist() == [r for r in range(size) for _ in range(rank)]
    assert group.smallest(7 - rank) == 8 - size
    assert group.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    assert group.num_collectives > 4 * 5


def exchanges(group: TorchGroup) -> None:
    """The MoE layer over ranks equals one rank: the same cases as with threads, fewer of them."""
    torch.manual_seed(0)  # the same tokens on every rank
    everything = WEIGHTS.store(tuple(range(E)))
    for mode in MODES:
        for kind, replicated in (("contiguous", ()), ("round-robin", (3, 0))):
            for num_tokens in (1, 9):
                x_TD, routing = torch.randn(num_tokens, D), make_routing(num_tokens)
                spread = ExpertSpread(E, group.size, kind, replicated)  # type: ignore[arg-type]
                store = WEIGHTS.store(spread.experts_of(group.rank))
                y_TD = run_exchange(make_mode(mode, spread, group), store, x_TD, routing)
                expected = run_exchange(Local(E), everything, x_TD, routing)
                torch.testing.assert_close(y_TD, expected, atol=1e-5, rtol=1e-5)
                assert torch.equal(group.all_gather(y_TD[None])[0], y_TD), "the same bits everywhere"
    assert make_exchange("static", spread, group, CPU).graph_safe is False, "Gloo is not for CUDA graphs"


def steps(ranks: ConnectedRanks) -> None:
    """What rank 0 sends, short and long, arrives as it was, without what only rank 0 needs."""
    long = Chunk(3, 0, 3000, list(range(3000)), 0, list(range(188)), ELSEWHERE)
    batches = [
        [Chunk(r, 7, 1, None, 0, (), ELSEWHERE) for r in range(70)],
        [long],
        [Chunk(1, 0, 2, [5, 6], 1, [9], None)],
    ]
    for batch in batches:
        if ranks.is_follower:
            received = ranks.receive()
            assert received is not None
            assert [(c.row, c.start, c.length, c.first_page, c.sample) for c in received] == [
                (c.row, c.start, c.length, c.first_page, c.sample) for c in batch
            ]
            assert [(c.token_ids, list(c.pages)) for c in received] == [
                (c.token_ids, list(c.pages)) for c in batch
            ]
        ranks.send(batch)


def hang(ranks: ConnectedRanks, seconds: float) -> None:
    """Rank 1 stops joining collectives while its process and its beats go on: the others name it."""
    if ranks.place.rank == 1:
        ranks.group.all_reduce(torch.ones(1))
        time.sleep(seconds)
    start = time.monotonic()
    ranks.group.all_reduce(torch.ones(1))
    with pytest.raises(EngineLost, match="rank 1 hangs"), ranks.guard():
        ranks.group.all_reduce(torch.ones(1))
    elapsed = time.monotonic() - start
    assert elapsed < 10, f"noticed after {elapsed:.1f} s"
    print("noticed", flush=True)
    time.sleep(2)  # the store is in this process: let the others read what happened


def run_rank(case: str, place: Rendezvous) -> None:
    """Join the others and run "all" checks, or "hang": noticed by a collective's timeout, or by beats where that is long."""
    store = dist.TCPStore(place.address, place.port, is_master=place.rank == 0, timeout=timedelta(seconds=30))
    options = {"hang": {"collective_timeout": 2.0}, "hang in service": {"collective_timeout": 60.0}}.get(
        case, {}
    )
    config = EngineConfig.from_kwargs(device="cpu", tensor_parallel_size=place.size, **options)
    ranks = ConnectedRanks(place, store, config)
    if case.startswith("hang"):
        if case == "hang in service":
            ranks.wait_ready()
        hang(ranks, 30)
        return
    assert isinstance(ranks.group, TorchGroup)
    collectives(ranks.group)
    exchanges(ranks.group)
    steps(ranks)
    ranks.wait_ready()
    ranks.close()
