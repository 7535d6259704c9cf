"""What the server itself costs, measured on an engine that does nothing: python benchmark/serve.py
[overhead|soak|all] [--record]

overhead: 64 streams at once from a stand-in engine that steps every 20 ms (and one that steps as fast as it
can). Each token carries the time it was made, so the way from the engine loop through the API process to the
client's socket is timed token by token.
soak: 10,000 short requests, a third of which hang up at a random moment, after as many that warm the server
up. Nothing may be lost, pages must balance, memory must stay flat.
Throughout both, /health is asked every 20 ms from a process of its own.

Results are checked (texts are complete and right) before they are printed; --record appends them to
benchmark/results/serve.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from benchmark.record import append_record
from minisgl.server.bench_client import HttpStream, percentiles

ROOT = pathlib.Path(__file__).parents[1]
STREAMS, TOKENS = 64, 200
REQUESTS, AT_ONCE = 10_000, 16


class NullServer:
    """A server process on the stand-in engine."""

    def __init__(self, **settings: dict[str, Any]):
        self._folder = tempfile.TemporaryDirectory()
        env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "minisgl.server.null_server",
            self._folder.name,
            json.dumps(settings),
        ]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline().split()[1])}"
        self.api = psutil.Process(self.process.pid)

    def __enter__(self) -> NullServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._folder.cleanup()

    def memory(self) -> int:
        """Resident bytes of the API process and the engine process."""
        return self.api.memory_info().rss + sum(child.memory_info().rss for child in self.api.children())

    def cpu_seconds(self) -> float:
        """CPU time of the API process so far."""
        times = self.api.cpu_times()
        return times.user + times.system


async def timed_stream(url: str, delays: list[float], gaps: list[float]) -> None:
    """One stream; appends each token's way from engine to client, and the time between tokens (seconds)."""
    body = {"prompt": "overhead ", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    stream = await HttpStream.open(url, "/v1/completions", body)
    assert stream.status == 200, await stream.read()
    text, last = "", 0.0
    async for piece in stream.chunks():
        now = time.monotonic_ns()
        for line in piece.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if not chunk["choices"]:
                continue
            text += chunk["choices"][0]["text"]
            delays.append(now / 1e9 - chunk["usage"]["prompt_tokens_details"]["cached_tokens"] / 1e6)
            if last:
                gaps.append((now - last) / 1e9)
            last = now
    stream.close()
    wanted = ("overhead " * TOKENS)[:TOKENS]
    assert text == wanted[:9] + wanted[10:], text[
        :40
    ]  # the stand-in says its end token once, after the first repetition


async def overhead(step_seconds: float) -> dict[str, Any]:
    """64 streams of 200 tokens."""
    with NullServer(null={"step_seconds": step_seconds, "stamp": True}) as server:
        warm: list[float] = []
        await asyncio.gather(*(timed_stream(server.url, warm, []) for _ in range(STREAMS)))
        delays: list[float] = []
        gaps: list[float] = []
        with HealthWatch(server.url) as health:
            cpu, began = server.cpu_seconds(), time.perf_counter()
            await asyncio.gather(*(timed_stream(server.url, delays, gaps) for _ in range(STREAMS)))
            seconds, cpu = time.perf_counter() - began, server.cpu_seconds() - cpu
    tokens = STREAMS * TOKENS
    return {
        "case": "overhead",
        "step_ms": 1000 * step_seconds,
        "streams": STREAMS,
        "tokens_per_second": round(tokens / seconds),
        "engine_to_client_ms": _ms(delays),
        "inter_token_ms": _ms(gaps),
        "api_cpu_us_per_token": round(1e6 * cpu / tokens, 1),
        "health_ms": health.result(),
    }


def _ms(values: list[float]) -> dict[str, float]:
    return {name: round(1000 * value, 3) for name, value in percentiles(values).items()}


async def short_request(url: str, number: int, rng: random.Random) -> str:
    """One short request, streamed or not; a third of them hang up after a moment. Returns what became of it."""
    text = f"request number {number} "
    body = {"prompt": text, "max_tokens": 16, "stream": rng.random() < 0.5}
    leaves = rng.random() < 0.33
    asked = asyncio.ensure_future(_ask(url, body))
    try:
        got = await asyncio.wait_for(asked, rng.random() * 0.02 if leaves else 60)
    except asyncio.TimeoutError:
        return "left" if leaves else "lost"
    return "answered" if got == text[:16] else "wrong"


async def _ask(url: str, body: dict[str, Any]) -> str:
    stream = await HttpStream.open(url, "/v1/completions", body)
    try:
        data = b"".join([piece async for piece in stream.chunks()])
    finally:
        stream.close()
    if stream.status != 200:
        return data.decode()
    chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")] or [
        json.loads(data)
    ]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


class HealthWatch:
    """Times /health every 20 ms while its block runs; in a process of its own, or it would time the load."""

    def __init__(self, url: str):
        context = multiprocessing.get_context("spawn")
        self._times, self._begun, self._done = context.Queue(), context.Event(), context.Event()
        arguments = (url, self._times, self._begun, self._done)
        self._process = context.Process(target=_watch_health, args=arguments, daemon=True)

    def __enter__(self) -> HealthWatch:
        self._process.start()
        assert self._begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._seconds: list[float] = self._times.get(timeout=10)
        self._process.join()

    def result(self) -> dict[str, float]:
        """Percentiles and the slowest, in milliseconds."""
        return _ms(self._seconds) | {"max": round(1000 * max(self._seconds), 2), "polls": len(self._seconds)}


def _watch_health(url: str, results: Any, begun: Any, done: Any) -> None:
    """Put the times (seconds) into a queue at the end."""
    times: list[float] = []

    async def ask() -> None:
        began = time.perf_counter()
        stream = await HttpStream.open(url, "/health")
        await stream.read()
        assert stream.status == 200
        times.append(time.perf_counter() - began)

    async def poll() -> None:
        await ask()
        times.clear()
        begun.set()
        while not done.is_set():
            await ask()
            await asyncio.sleep(0.02)

    asyncio.run(poll())
    results.put(times)


async def _pages(url: str) -> dict[str, float]:
    text = (await (await HttpStream.open(url, "/metrics")).read()).decode()
    found = re.finditer(r"^minisgl:kv_pages_(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    return {match[1]: float(match[2]) for match in found}


async def soak() -> dict[str, Any]:
    """10,000 short requests with random disconnects."""
    rng = random.Random(1)
    with NullServer(null={"step_seconds": 0.0005}) as server:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> str:
            async with gate:
                return await short_request(server.url, number, rng)

        # Once for what a server allocates once; growth from there on is a leak.
        await asyncio.gather(*map(one, range(REQUESTS)))
        before, total = server.memory(), sum((await _pages(server.url)).values())
        with HealthWatch(server.url) as health:
            os.nice(
                10
            )  # those who ask live on another machine in life; on this one they must not take the server's place
            began = time.perf_counter()
            results = await asyncio.gather(*map(one, range(REQUESTS)))
            seconds = time.perf_counter() - began
        await asyncio.sleep(1.2)  # two beats of the engine
        after, pages = server.memory(), await _pages(server.url)
    counts = {name: results.count(name) for name in ("answered", "left", "lost", "wrong")}
    assert counts["lost"] == counts["wrong"] == 0, counts
    assert pages["protected"] == 0, pages
    assert sum(pages.values()) == total, pages
    return {
        "case": "soak",
        "requests": REQUESTS,
        **counts,
        "seconds": round(seconds, 1),
        "rss_mb": [round(before / 2**20, 1), round(after / 2**20, 1)],
        "rss_growth_percent": round(100 * (after - before) / before, 2),
        "pages_balanced": True,
        "health_ms": health.result(),
    }


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="all", choices=("overhead", "soak", "all"))
    parser.add_argument(
        "--record", action="store_true", help="append the results to benchmark/results/serve.jsonl"
    )
    args = parser.parse_args()
    results = []
    if args.what in ("overhead", "all"):
        results += [asyncio.run(overhead(0.02)), asyncio.run(overhead(0.0))]
    if args.what in ("soak", "all"):
        results.append(asyncio.run(soak()))
    for result in results:
        print(json.dumps(result))
        if args.record:
            append_record("serve", result)


if __name__ == "__main__":
    main()
