"""Groups, exchanges and steps over real Gloo between processes; a hanging rank is named."""

from __future__ import annotations

import multiprocessing

import pytest

from minisgl.parallel import Rendezvous
from tests.parallel.gloo_rank import run_rank
from tests.parallel.processes import free_port


def run_ranks(case: str, size: int) -> list[int | None]:
    """Exit codes. Forked, so that no rank has to import everything again; nothing has started threads in this process."""
    port, context = free_port(), multiprocessing.get_context("fork")
    places = [Rendezvous(rank, size, rank, "127.0.0.1", port) for rank in range(size)]
    ranks = [context.Process(target=run_rank, args=(case, place)) for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_exchanges_and_steps(size: int) -> None:
    assert run_ranks("all", size) == [0] * size


@pytest.mark.parametrize("case", ["hang", "hang in service"])
def test_a_rank_that_hangs_in_python_is_named(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(case, 2) == [0, 1]
    output = capfd.readouterr()
    assert "noticed" in output.out, "by rank 0, which raised an error"
    assert "rank 1 ends: rank 1 hangs" in output.err, "by rank 1 itself, which was told"
