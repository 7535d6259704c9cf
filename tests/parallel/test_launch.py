"""Ranks started by a launcher's environment, commands over several ranks, and nothing left behind when rank 0 ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM
from minisgl.parallel import Rendezvous
from tests.e2e.model_factory import make_model
from tests.parallel.processes import (
    ENVIRONMENT,
    children,
    ends,
    files_of,
    free_port,
    interrupt,
    runs,
    start,
    start_ranks,
    until,
)


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


def test_two_nodes_of_torchrun(folder: Path) -> None:
    """As docs and examples say, on one host: an agent a node, and two ranks each, which share two key/value heads."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    line = command(folder, "--tp", "4", "--expert-parallel-size", "4", "--max-tokens", "8", "--json", "hello")
    nodes = [start([*launcher, "--node-rank", str(node), *line]) for node in range(2)]
    (code, output), (other_code, other) = (ends(node, 120) for node in nodes)
    assert (code, other_code) == (0, 0), output + other
    assert output.count("token_ids") == 2 and "token_ids" not in other, "prompt and answer, once"


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
    process.send_signal(number) if number == signal.SIGKILL else interrupt(process)
    assert ends(process, 10)[0] == code
    assert until(lambda: not runs(child), 5)


@dataclass
class Served:
    """A running server of two ranks. family: its engine's processes, rank 0 first; files: what they have in the file system."""

    process: subprocess.Popen[str]
    http: Any
    family: list[int]
    files: set[Path]

    def nothing_is_left(self) -> bool:
        gone = until(lambda: not any(runs(pid) for pid in self.family), 10)
        return gone and not any(path.exists() for path in self.files)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    httpx = pytest.importorskip("httpx", reason="the server's packages are not installed")
    pytest.importorskip("fastapi", reason="the server's packages are not installed")
    port = free_port()
    options = [
        "--device",
        "cpu",
        "--num-pages",
        "2000",
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
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        family = [pid for child in children(process.pid) for pid in (child, *children(child))]
        found = Served(process, http, family, files_of([process.pid, *family]))
        assert found.files, "the sockets between server and engine, at least"
        try:
            yield found
        finally:
            process.kill()


def test_a_server_whose_rank_dies_answers_503_and_ends(folder: Path) -> None:
    """Also with nothing to do: no request has to come for it to be noticed."""
    with serving(folder) as served:
        body = {"prompt": "hello", "max_tokens": 3}
        assert served.http.post("/v1/completions", json=body).status_code == 200
        (worker,) = [p for p in served.family if b"engine.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(worker, signal.SIGKILL)
        assert until(lambda: served.http.get("/ready").status_code == 503, 5)
        code, output = ends(served.process, 20)
        assert code == 1 and "rank 1 has died" in output
        assert served.nothing_is_left()


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 2)])
def test_ctrl_c_once_drains_and_twice_kills(folder: Path, times: int, code: int) -> None:
    with serving(folder) as served:
        body = {
            "prompt": "hello",
            "max_tokens": 300 if times == 1 else 19000,
            "ignore_eos": True,
            "stream": True,
        }
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            interrupt(served.process)
            if times == 1:
                assert [line for line in lines if line][-1] == "data: [DONE]", "what had begun is finished"
            else:
                assert until(lambda: served.http.get("/ready").status_code == 503, 5)
                interrupt(served.process)
            assert ends(served.process, 30)[0] == code  # with the answer still open: leaving would end it
        assert served.nothing_is_left()


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
