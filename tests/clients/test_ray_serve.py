"""examples/ray_serve.py: two replicas of the demo model behind Ray Serve; one is killed under load, and no request is lost that
had not started streaming. Ray is installed apart (`make test-clients`): MINISGL_RAY_PYTHON names the Python that has it, and
minisgl."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = os.environ.get("MINISGL_RAY_PYTHON", str(ROOT / ".venv/ray/bin/python"))
NUM_TOKENS = 150
NUM_REQUESTS = 24


def has_ray() -> bool:
    try:
        return subprocess.run([PYTHON, "-c", "import ray.serve"], capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ray(), reason=f"{PYTHON} has no Ray: `make test-clients` installs it")


def descendants(pid: int) -> list[int]:
    out = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            out += [child, *descendants(child)]
    return out


def title(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], object], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@dataclass
class Cluster:
    """The example, running."""

    url: str
    process: subprocess.Popen[str]

    def replicas(self) -> list[int]:
        """Processes of the replicas that are there now."""
        return [
            p
            for p in descendants(self.process.pid)
            if title(p).startswith("ray::ServeReplica:minisgl:Replica")
        ]

    def engine_of(self, replica: int) -> int:
        """Its engine process, 0 before there is one."""
        return next((p for p in descendants(replica) if "spawn_main" in title(p)), 0)

    def is_whole(self) -> bool:
        """Whether both replicas have an engine."""
        return len([p for p in self.replicas() if self.engine_of(p)]) == 2

    def complete(self, prompt: str, num_tokens: int = 4) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    flags = [
        "--device",
        "cpu",
        "--min-replicas",
        "2",
        "--max-replicas",
        "2",
        "--port",
        str(port),
        "--num-pages",
        "600",
    ]
    process = subprocess.Popen(
        [PYTHON, str(ROOT / "examples/ray_serve.py"), "demo", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("READY") for line in process.stdout), "the example did not start"
    family = descendants(process.pid)
    yield Cluster(f"http://127.0.0.1:{port}", process)
    process.terminate()
    assert process.wait(60) == 0
    assert until(lambda: not any(runs(pid) for pid in family), 20), "nothing stays behind"


@dataclass
class Asked:
    """One request of the load and what became of it. first: when its answer began, 0 if it never did."""

    stream: bool
    first: float = 0.0
    replica: str = ""
    text: str = ""
    whole: bool = False
    error: str = ""
    started: float = field(default_factory=time.monotonic)

    def run(self, url: str, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": self.stream}, timeout=120
            ) as answer:
                self.replica = answer.headers.get("x-replica", "")
                if answer.status_code != 200:
                    self.error = f"{answer.status_code} {answer.read().decode()}"
                    return
                for line in answer.iter_lines():
                    self.first = self.first or time.monotonic()
                    self.read(line)
        except httpx.HTTPError as error:
            self.error = repr(error)

    def read(self, line: str) -> None:
        if line == "data: [DONE]":
            self.whole = True
        elif line:
            fields = json.loads(line.removeprefix("data: "))
            if "error" in fields:
                self.error = str(fields["error"])
            else:
                self.text += fields["choices"][0]["text"]
                self.whole = self.whole or not self.stream


@pytest.mark.parametrize("victim", ["replica", "engine"])
@pytest.mark.timeout(300)
def test_one_is_killed_under_load(cluster: Cluster, victim: str) -> None:
    assert until(cluster.is_whole, 90), "both replicas are there"
    expected = cluster.complete("Tale 0: once upon a time", NUM_TOKENS).json()["choices"][0]["text"]
    load = [Asked(stream=i % 2 == 0) for i in range(NUM_REQUESTS)]
    threads = [
        threading.Thread(target=asked.run, args=(cluster.url, f"Tale {i // 8}: once upon a time"))
        for i, asked in enumerate(load)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # so that at the kill some stream and some have only come
    assert until(lambda: [a for a in load if a.replica], 30)
    replica = int(next(a.replica for a in load if a.replica).rpartition("-")[2])
    assert replica in cluster.replicas()
    os.kill(replica if victim == "replica" else cluster.engine_of(replica), signal.SIGKILL)
    for thread in threads:
        thread.join(200)
    broken = [a for a in load if a.error or not a.whole]
    assert broken, "the kill came while some streamed"
    assert all(a.stream and a.first and a.replica.endswith(f"-{replica}") for a in broken), (
        "none is lost that had not begun"
    )
    rest = [a for a in load if a not in broken]
    assert len(rest) >= NUM_REQUESTS // 2, "answers that are not streamed are whole"
    assert all(a.text == expected for i, a in enumerate(load) if i < 8 and a in rest)
    assert until(cluster.is_whole, 90), "Ray replaces it"
    old = {a.replica for a in load}
    assert until(lambda: cluster.complete(os.urandom(20).hex()).headers["x-replica"] not in old, 30)


@pytest.mark.timeout(200)
def test_texts_that_begin_alike_meet_in_one_replica(cluster: Cluster) -> None:
    assert until(cluster.is_whole, 90)
    beginnings = [f"{word} " * 200 for word in ("north", "south", "east", "west", "up", "down")]
    homes = [
        {cluster.complete(f"{beginning} and then {i}").headers["x-replica"] for i in range(5)}
        for beginning in beginnings
    ]
    assert all(len(home) == 1 for home in homes), homes
    assert len(set.union(*homes)) == 2, "and not all texts in the same one"


def test_what_a_replica_refuses_is_passed_on(cluster: Cluster) -> None:
    assert cluster.complete("x", 10**6).status_code == 400
    assert httpx.get(f"{cluster.url}/nothing").status_code == 404
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "demo"
