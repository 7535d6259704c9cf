"""Ranks started by a launcher's environment, commands over several ranks, and nothing left behind when rank 0 ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from minisgl import LLM
from minisgl.parallel import Rendezvous
from tests.e2e.model_factory import make_model
from tests.parallel.processes import ENVIRONMENT, children, ends, free_port, runs, start, start_ranks, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen3_moe", max_position_embeddings=20000)
    return path


def command(folder: Path, *rest: str) -> list[str]:
    return [
        "-m",
        "minisgl",
        "generate",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--num-pages",
        "2000",
        *rest,
    ]


def test_two_process_groups_that_meet_over_tcp(folder: Path) -> None:
    """What two machines do: the same command on each, and torch.distributed's environment. Rank 0 alone writes."""
    line = command(folder, "--tp", "2", "--expert-parallel-size", "2", "--max-tokens", "8", "--json", "hello")
    (code, output), (other_code, other) = (ends(process) for process in start_ranks(line, 2))
    assert (code, other_code) == (0, 0), output + other
    assert "token_ids" in output and "token_ids" not in other


def test_a_launcher_of_another_size_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Rendezvous(0, 3, 0, "127.0.0.1", free_port()).environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"--tp=2, but the launcher started 3 ranks"):
        LLM(str(folder), device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_however_rank_0_ends_no_rank_stays(folder: Path, number: signal.Signals, code: int) -> None:
    process = start(command(folder, "--tp", "2", "--max-tokens", "19000", "a", "b"))
    assert process.stdout is not None
    for line in process.stdout:
        if "max-seq-len" in line:  # the last decision: it is loaded and writes
            break
    (child,) = children(process.pid)
    assert runs(child)
    process.send_signal(number)
    assert ends(process, 10)[0] == code
    assert until(lambda: not runs(child), 5)


def test_a_server_whose_rank_dies_answers_503_and_ends(folder: Path) -> None:
    """Also with nothing to do: no request has to come for it to be noticed."""
    httpx = pytest.importorskip("httpx", reason="the server's packages are not installed")
    pytest.importorskip("fastapi", reason="the server's packages are not installed")
    port = free_port()
    options = [
        "--device",
        "cpu",
        "--num-pages",
        "100",
        "--tp",
        "2",
        "--port",
        str(port),
        "--log-level",
        "info",
    ]
    process = start(["-m", "minisgl", "serve", str(folder), *options])
    assert process.stdout is not None
    assert any("serving" in line for line in process.stdout)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        body = {"prompt": "hello", "max_tokens": 3}
        assert http.post("/v1/completions", json=body).status_code == 200
        family = [pid for child in children(process.pid) for pid in (child, *children(child))]
        (worker,) = [p for p in family if b"engine.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(worker, signal.SIGKILL)
        until(lambda: http.get("/ready").status_code == 503, 5)
    code, output = ends(process, 20)
    assert code == 1 and "rank 1 has died" in output
    assert until(lambda: not any(runs(pid) for pid in family), 5)


def test_an_environment_that_is_half_set_names_the_variable() -> None:
    whole = Rendezvous(1, 4, 1, "10.0.0.1", 29500).environment()
    assert Rendezvous.from_environment(whole) == Rendezvous(1, 4, 1, "10.0.0.1", 29500)
    assert Rendezvous.from_environment({}) is None
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(ValueError, match=name):
            Rendezvous.from_environment({k: v for k, v in whole.items() if k != name})
    with pytest.raises(ValueError, match="RANK=4 must be less"):
        Rendezvous.from_environment({**whole, "RANK": "4"})
    slurm = {k: v for k, v in whole.items() if k != "LOCAL_RANK"} | {"SLURM_LOCALID": "3"}
    place = Rendezvous.from_environment(slurm)
    assert place is not None and place.local_rank == 3
    assert "RANK" not in ENVIRONMENT, "tests are not run by a launcher"
