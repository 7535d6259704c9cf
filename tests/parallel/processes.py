"""Starting ranks as processes, and looking at what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl.parallel import Rendezvous

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(arguments: Sequence[str], extra: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """python ARGUMENTS, its output in one pipe."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**ENVIRONMENT, **(extra or {})},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that `interrupt` reaches it and its children alone
    )


def start_ranks(arguments: Sequence[str], size: int) -> list[subprocess.Popen[str]]:
    """The same command once a rank, as launchers do on several machines: rank 0 last."""
    port = free_port()
    places = [Rendezvous(rank, size, rank, "127.0.0.1", port) for rank in reversed(range(size))]
    return [start(arguments, place.environment()) for place in places][::-1]


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C: a terminal sends it to all processes of the group."""
    os.killpg(process.pid, signal.SIGINT)


def ends(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str]:
    """(exit code, output), or the process killed and a failure."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {timeout} s: {process.communicate()[0]}") from None
    return process.returncode, output


def files_of(pids: Sequence[int]) -> set[Path]:
    """Shared memory and Unix sockets that processes hold and that have a name in the file system."""
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        if len(fields := line.split()) == 8 and fields[7].startswith("/"):
            sockets[f"socket:[{fields[6]}]"] = Path(fields[7])
    found = set()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {Path(line.split()[5]) for line in maps if "/dev/shm/" in line}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (path := sockets.get(os.readlink(fd))) is not None:
                    found.add(path)
    return found


def children(pid: int) -> list[int]:
    """Processes that a process started and that still run."""
    out = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        out += [int(word) for word in (task / "children").read_text().split()]
    return out


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], object], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
