"""`plan-experts`: the balance of a spread by hand, replicas that help, and files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.cli import main
from minisgl.moe.store.shard import ExpertSpread
from minisgl.planner.experts import measure, propose, windowed_counts


def save(path: Path, ids: np.ndarray, num_experts: int) -> str:
    np.savez_compressed(
        path, ids=ids.astype(np.int16), num_experts=num_experts, layers=np.arange(ids.shape[1])
    )
    return str(path)


def test_balance_by_hand() -> None:
    counts = np.array([[[6.0, 2.0, 0.0, 0.0]]])
    contiguous = measure(counts, ExpertSpread(4, 2))
    assert contiguous.imbalance == 2.0 and contiguous.memory == 1.0, "all eight routes on one rank of two"
    assert measure(counts, ExpertSpread(4, 2, "round-robin")).imbalance == 1.5, "6 and 2"
    replica = measure(counts, ExpertSpread(4, 2, "round-robin", (0,)))
    assert replica.imbalance == 1.25, "3 and 3 + 2"
    assert replica.memory == 1.5, "rank 1 holds three experts instead of two"


def test_windows_count_every_route_once_and_no_padding() -> None:
    ids = np.random.default_rng(0).integers(-1, 6, (50, 2, 3))
    counts = windowed_counts(ids, 6, 25)
    assert counts.shape == (2, 2, 6) and counts.sum() == (ids >= 0).sum()
    assert windowed_counts(ids, 6, 1000).shape == (1, 2, 6), "a short trace is one window"
    assert windowed_counts(ids, 6, 40).shape == (1, 2, 6)


def test_replicas_are_the_hot_experts_and_help() -> None:
    rng = np.random.default_rng(1)
    chances = np.array([0.3, 0.25] + [0.45 / 14] * 14)
    ids = rng.choice(16, (2000, 3, 2), p=chances)
    found = propose(windowed_counts(ids, 16, 200), 4, "contiguous", 4)
    assert set(found[2].spread.replicated) == {0, 1}
    values = [balance.imbalance for balance in found]
    assert values == sorted(values, reverse=True) and values[2] < 0.7 * values[0]
    assert len(propose(windowed_counts(ids, 16, 200), 4, "contiguous", 1)) == 2


def test_even_use_needs_no_replicas() -> None:
    ids = np.tile(np.arange(8), 100).reshape(100, 1, 8)
    assert [b.imbalance for b in propose(windowed_counts(ids, 8, 50), 2, "contiguous", 4)] == [1.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    trace = save(tmp_path / "trace.npz", np.minimum(rng.geometric(0.3, (600, 2, 2)) - 1, 7), 8)
    assert main(["plan-experts", "--trace", trace, "--ranks", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["imbalance"] == min(row["imbalance"] for row in answer["tried"])
    assert answer["best"]["flags"].startswith("--tp 2 --expert-parallel-size 2 --moe-expert-placement ")
    assert main(["plan-experts", "--trace", trace, "--ranks", "4", "--max-replicas", "2"]) == 0
    assert "--expert-parallel-size 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--ranks", "3"], "does not divide the model's 8 experts"),
        (["--ranks", "1"], "--ranks=1 must be at least 2"),
        (["--window", "0"], "--window=0"),
        (["--trace", "FOLDER/none.npz"], "not a routing trace"),
        (["--trace", "FOLDER/other.npz"], "not a routing trace"),
        (["--trace", "FOLDER/empty.npz"], "holds no tokens"),
    ],
)
def test_errors_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], words: str
) -> None:
    trace = save(tmp_path / "trace.npz", np.zeros((4, 1, 1)), 8)
    save(tmp_path / "empty.npz", np.zeros((0, 1, 1)), 8)
    np.savez(tmp_path / "other.npz", x=np.zeros(1))
    line = [word.replace("FOLDER", str(tmp_path)) for word in line]
    assert main(["plan-experts", "--trace", trace, *line]) == 2
    assert words in capsys.readouterr().err
