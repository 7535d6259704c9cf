"""Load generator: Poisson arrivals against any OpenAI-compatible server, and percentiles of what the clients
saw.

HTTP is spoken by hand over asyncio streams. A general client costs more than the server under test at a few
thousand tokens a second, and would be what one measures.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from minisgl.flags import flag


@dataclass(frozen=True)
class BenchConfig:
    """What to send. Raises ValueError on nonsense."""

    url: str = flag("http://127.0.0.1:8000", "server to load")
    model: str | None = flag(None, "model name to ask for; default: the server's first")
    api_key: str | None = flag(None, "bearer token")
    num_prompts: int = flag(200, "requests in all")
    rate: float = flag(0.0, "requests a second, with Poisson arrivals; 0 sends all at once")
    max_concurrency: int = flag(256, "requests open at the same time")
    input_len: int = flag(220, "mean prompt length in words; lengths are spread like those of real chats")
    output_len: int = flag(180, "mean answer length in tokens; spread likewise")
    trace: str | None = flag(
        None, "file with one JSON object a line: prompt or input_len, output_len, at (seconds)"
    )
    seed: int = flag(0, "seed of lengths, words and arrivals")
    json_out: str | None = flag(None, "file to append the result to, as one JSON line")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_concurrency", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.rate >= 0:
            raise ValueError(f"rate={self.rate} must be 0 (all at once) or more requests a second")
        if urlsplit(self.url).scheme != "http":
            raise ValueError(f"url={self.url} must begin with http://")


@dataclass(frozen=True)
class Planned:
    """One request to come: when (seconds from the start), what, and how many tokens."""

    at: float
    prompt: str
    output_len: int


@dataclass
class Observed:
    """What became of a request. times: perf_counter() of each piece of text."""

    began: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""
    ended: float = 0.0


_TOKENS_A_WORD = 1.5  # at most, of those below, in vocabularies of any use
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
]


def plan(config: BenchConfig, max_model_len: int | None = None) -> list[Planned]:
    """The requests of a run; the same for the same seed. ValueError for a trace that cannot be read.

    max_model_len: context of the model in tokens, if it is known. Lengths that are drawn are cut to it, those of a trace are
    not: what a trace asks for is what is measured.
    """
    rng = random.Random(config.seed)
    if config.trace is not None:
        return _plan_from_trace(config, rng)
    at, planned = 0.0, []
    for _ in range(config.num_prompts):
        num_words, output_len = _length(rng, config.input_len), _length(rng, config.output_len)
        if max_model_len is not None:
            output_len = min(output_len, max_model_len // 2)
            num_words = min(num_words, int((max_model_len - output_len) / _TOKENS_A_WORD))
        planned.append(Planned(at, " ".join(rng.choices(_WORDS, k=num_words)), output_len))
        at += rng.expovariate(config.rate) if config.rate > 0 else 0.0
    return planned


def _length(rng: random.Random, mean: int) -> int:
    """Log-normal with sigma 0.9, cut at 8 times the mean: few long ones among many short ones, as in chat
    logs.
    """
    return max(1, min(8 * mean, round(mean * rng.lognormvariate(-0.405, 0.9))))


def _plan_from_trace(config: BenchConfig, rng: random.Random) -> list[Planned]:
    assert config.trace is not None
    planned = []
    with open(config.trace, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                length = int(entry.get("input_len", config.input_len))
                prompt = entry.get("prompt") or " ".join(rng.choices(_WORDS, k=length))
                planned.append(
                    Planned(
                        float(entry.get("at", 0)), prompt, int(entry.get("output_len", config.output_len))
                    )
                )
            except (ValueError, AttributeError, TypeError) as error:
                raise ValueError(f"{config.trace}, line {number}: {error}") from error
    return planned[: config.num_prompts]


class HttpStream:
    """One request over one connection: status, then the body as it comes. Enough of HTTP/1.1 for our own
    servers.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, url: str, path: str, body: Any = None, api_key: str | None = None) -> HttpStream:
        """POST a JSON body, or GET if there is none; returns once the head of the answer is here."""
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{'GET' if body is None else 'POST'} {place.path}{path} HTTP/1.1", f"Host: {place.netloc}"]
        lines += ["Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        stream = cls(reader, writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        stream.status = int(head[0].split()[1])
        stream.headers = {
            k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)
        }
        return stream

    async def chunks(self) -> AsyncIterator[bytes]:
        """Pieces of the body."""
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._reader.readexactly(int(self.headers.get("content-length", 0)))
            return
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]

    async def read(self) -> bytes:
        """The whole body; closes the connection."""
        body = b"".join([piece async for piece in self.chunks()])
        self.close()
        return body

    def close(self) -> None:
        """Leave, whether or not the answer is complete."""
        self._writer.close()


async def observe(config: BenchConfig, model: str, planned: Planned) -> Observed:
    """Send one request and note when its text comes."""
    body = {
        "model": model,
        "prompt": planned.prompt,
        "max_tokens": planned.output_len,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen = Observed(time.perf_counter())
    try:
        stream = await HttpStream.open(config.url, "/v1/completions", body, config.api_key)
        if stream.status != 200:
            seen.error = f"{stream.status}: {(await stream.read())[:200].decode(errors='replace')}"
            return seen
        async for piece in stream.chunks():
            now = time.perf_counter()
            for line in piece.split(b"\n"):
                if line.startswith(b"data: {"):
                    _note(seen, json.loads(line[6:]), now)
        stream.close()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.ended = time.perf_counter()
    return seen


def _note(seen: Observed, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        seen.error = chunk["error"]["message"]
    if chunk.get("usage"):
        seen.num_tokens = chunk["usage"]["completion_tokens"]
    if chunk.get("choices"):
        seen.times.append(now)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90 and p99; zeros when there is nothing."""
    ordered = sorted(values) or [0.0]
    out = {"mean": sum(ordered) / len(ordered)}
    for percent in (50, 90, 99):
        out[f"p{percent}"] = ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
    return out


def summarize(observed: Sequence[Observed], seconds: float) -> dict[str, Any]:
    """Throughput and latencies (seconds) of a run."""
    good = [o for o in observed if not o.error and o.times]
    gaps = [b - a for o in good for a, b in zip(o.times, o.times[1:], strict=False)]
    tokens = sum(o.num_tokens for o in good)
    errors = [o.error for o in observed if o.error]
    return {
        "requests": len(observed),
        "failed": len(observed) - len(good),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "output_tokens": tokens,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "time_to_first_token": percentiles([o.times[0] - o.began for o in good]),
        "inter_token_latency": percentiles(gaps),
        "request_latency": percentiles([o.ended - o.began for o in good]),
    }


async def run_load(config: BenchConfig, progress: Any = None) -> dict[str, Any]:
    """Send everything as planned; returns the summary. progress: called after each request. ValueError if
    none answers.
    """
    card = await _model_card(config)
    gate = asyncio.Semaphore(config.max_concurrency)
    began = time.perf_counter()

    async def one(planned: Planned) -> Observed:
        await asyncio.sleep(max(0.0, planned.at - (time.perf_counter() - began)))
        async with gate:
            seen = await observe(config, card["id"], planned)
        if progress is not None:
            progress()
        return seen

    observed = await asyncio.gather(*map(one, plan(config, card.get("max_model_len"))))
    return {"model": card["id"], "rate": config.rate, "max_concurrency": config.max_concurrency} | summarize(
        observed, time.perf_counter() - began
    )


async def _model_card(config: BenchConfig) -> dict[str, Any]:
    """What the server says of the model asked for, else of its first."""
    try:
        stream = await HttpStream.open(config.url, "/v1/models", api_key=config.api_key)
        cards = json.loads(await stream.read())["data"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"no server answers at {config.url} ({error}): start one, or give --url") from error
    if config.model is None:
        return cards[0]
    return next((card for card in cards if card["id"] == config.model), {"id": config.model})


def report(result: dict[str, Any]) -> str:
    """The summary as a table for people."""
    lines = [
        f"model {result['model']}: {result['requests']} requests, {result['failed']} failed, {result['seconds']:.1f} s",
        f"{result['requests_per_second']:10.2f} requests/s {result['output_tokens_per_second']:10.1f} output tokens/s",
        f"{'ms':24}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")),
    ]
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        values = "".join(f"{1000 * value:10.2f}" for value in result[name].values())
        lines.append(f"{name.replace('_', ' '):24}{values}")
    if result["first_error"]:
        lines.append(f"first error: {result['first_error']}")
    return "\n".join(lines)


def main(config: BenchConfig) -> int:
    """Run with a progress bar and print the report; returns the exit code (1 if a request failed)."""
    from rich.progress import (
        Progress,
    )  # only here: the rest of this module is imported by tests and benchmarks

    with Progress() as bar:
        task = bar.add_task("requests", total=config.num_prompts)
        result = asyncio.run(run_load(config, lambda: bar.advance(task)))
    print(report(result))
    if config.json_out is not None:
        with open(config.json_out, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 1 if result["failed"] else 0
