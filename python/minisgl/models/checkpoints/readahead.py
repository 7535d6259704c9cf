"""Reading ahead: threads read the next tensors while the current one is converted, within a bound of memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

LIMIT = 2**26  # bytes read and not yet taken; a single job may be larger
MAX_THREADS = 8  # measured on tmpfs: host memory is saturated by then


def num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def read_ahead(
    jobs: Iterable[Job], read: Callable[[Job], Result], cost: Callable[[Job], int], limit: int = LIMIT
) -> Iterator[tuple[Job, Result]]:
    """(job, read(job)) in the order of jobs. cost: bytes that a job's result holds; at most `limit` of them wait.

    What `read` raises is raised where its result would come. Closing the iterator waits for reads under way.
    """
    pending: deque[tuple[Job, int, Future[Result]]] = deque()
    waiting = 0
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="read") as pool:
        try:
            for job in jobs:
                size = cost(job)
                while pending and waiting + size > limit:
                    first, taken, future = pending.popleft()
                    yield first, future.result()
                    del future  # it holds the result
                    waiting -= taken
                pending.append((job, size, pool.submit(read, job)))
                waiting += size
            while pending:
                first, _, future = pending.popleft()
                yield first, future.result()
                del future
        finally:
            for _, _, future in pending:
                future.cancel()
