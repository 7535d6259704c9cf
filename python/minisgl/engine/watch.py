"""A rank that dies or hangs is noticed by the others: every rank beats twice a second, and a thread of each looks at all.

Beats live in the torch.distributed store that the ranks met at. The thread has a connection of its own, since a store is
busy while somebody waits at it. What is noticed: a rank that says why it failed (at once), a process that is gone or stopped
(no beat for `SILENCE_S`), a store that does not answer (rank 0, or torchrun's agent, is gone), and once all ranks serve, a rank
whose thread still beats while its main thread hangs: beats say how many collectives a rank has joined, and one that is behind
and has joined none for `HANG_S` hangs, unless it compiles or tunes kernels, which takes as long as it takes. The timeout of
a collective comes after all that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

BEAT_S = 0.5
SILENCE_S = 6.0
HANG_S = 7.5
_SLOW = (
    "triton/compiler",
    "triton/backends",
    "moe/autotune",
    "torch/_inductor",
)  # in the path of what may take longer


class Watch:
    """Beats for this rank and looks at the others until `stop`.

    progress: how many collectives this rank has joined. find_problem: a further look, in words what is wrong.
    on_failure is called once, in the watching thread, with words that name the rank.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        progress: Callable[[], int],
        find_problem: Callable[[], str | None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._progress, self._find_problem, self._on_failure = progress, find_problem, on_failure
        self._stopped, self._serving = threading.Event(), False
        self._main = threading.get_ident()
        self._joined = [
            (0, time.monotonic())
        ] * size  # collectives of each rank, and since when it is at that
        self._watcher = store.clone()
        self._watcher.set_timeout(timedelta(seconds=SILENCE_S))
        self._watcher.set(
            f"beat/{rank}", "0 0 0"
        )  # here, so that whoever has joined has beaten at least once
        self._thread = threading.Thread(target=self._run, name="minisgl-watch", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Every rank has loaded: from now on one that is behind the others hangs."""
        self._serving = True

    def stop(self) -> None:
        """No failure is reported after this returns."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * SILENCE_S)

    def report(self, problem: str) -> None:
        """Tell the others what failed, unless one of them already has."""
        self._store.compare_set("failure", "", problem)

    def laggard(self) -> int | None:
        """The rank that has joined fewer collectives than this one: the one that a timeout is waiting for. None if all did."""
        joined = {}
        for rank in range(self._size):
            beat = (
                self._store.get(f"beat/{rank}").decode() if self._store.check([f"beat/{rank}"]) else "0 0 0"
            )
            joined[rank] = int(beat.split()[1])
        slowest = min(joined, key=lambda rank: joined[rank])
        return slowest if joined[slowest] < self._progress() else None

    def _run(self) -> None:
        beats, seen, since = 0, [b""] * self._size, [time.monotonic()] * self._size
        while not self._stopped.wait(BEAT_S):
            beats += 1
            try:
                self._watcher.set(f"beat/{self._rank}", f"{beats} {self._progress()} {int(self._is_slow())}")
                problem = self._find_problem() or self._look(seen, since)
            except Exception as error:
                problem = f"the store of rank 0 does not answer any more ({str(error).splitlines()[0]})"
            if problem is not None and not self._stopped.is_set():
                self._stopped.set()
                with contextlib.suppress(Exception):  # the others end, and what waits for them here wakes up
                    self._watcher.compare_set("failure", "", problem)
                self._on_failure(problem)

    def _look(self, seen: list[bytes], since: list[float]) -> str | None:
        if self._watcher.check(["failure"]):
            return self._watcher.get("failure").decode()
        now = time.monotonic()
        for rank in range(self._size):
            key = f"beat/{rank}"
            beat = self._watcher.get(key) if self._watcher.check([key]) else b""
            if (
                beat != seen[rank] or not beat
            ):  # before its first beat a rank is starting, which has a limit of its own
                seen[rank], since[rank] = beat, now
            elif now - since[rank] > SILENCE_S and rank != self._rank:
                return f"rank {rank} has not answered for {SILENCE_S:.0f} s: its process is gone or stopped"
            if self._hangs(rank, beat, now):
                return f"rank {rank} hangs: it has not joined a collective of the others for {HANG_S:.0f} s"
        return None

    def _hangs(self, rank: int, beat: bytes, now: float) -> bool:
        _, joined, is_slow = map(int, beat.split() or (0, 0, 0))
        known, since = self._joined[rank]
        if joined != known or is_slow or joined >= self._progress() or not self._serving:
            self._joined[rank] = (joined, now)
            return False
        return now - since > HANG_S

    def _is_slow(self) -> bool:
        """Whether this rank's main thread does what may take it longer than the others."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if any(part in frame.f_code.co_filename for part in _SLOW):
                return True
            frame = frame.f_back
        return False
