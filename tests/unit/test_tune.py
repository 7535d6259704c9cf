"""What `minisgl tune` measures, where that can be said without a GPU."""

import pytest

from minisgl.moe.base import ExpertShape
from minisgl.tune import parse_counts, part_of_rank


def test_a_rank_tunes_its_part_of_every_expert() -> None:
    whole = ExpertShape(model_dim=2048, hidden_dim=768, bias=True)
    assert part_of_rank(whole, 1) == whole
    assert part_of_rank(whole, 2) == ExpertShape(model_dim=2048, hidden_dim=384, bias=True)


@pytest.mark.parametrize("ranks", [0, -1, 5, 1024])
def test_ranks_that_cannot_share_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="tensor-parallel-size"):
        part_of_rank(ExpertShape(model_dim=2048, hidden_dim=768), ranks)


def test_token_counts_are_sorted_and_counted_once() -> None:
    assert parse_counts("64,1,64") == [1, 64]


@pytest.mark.parametrize("text", ["", "a", "1,0"])
def test_senseless_token_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--token-counts"):
        parse_counts(text)
