"""Request traces for replaying through a prefix cache: four that are made up here, and files of block hashes.

A trace is a list of requests; a request is when it came, and the blocks of its prompt and answer in order, each block a number
that stands for `block_tokens` tokens. Two requests share a prefix as long as their numbers agree.

Files are JSON lines with `timestamp`, `input_length` and `hash_ids`, as published with Mooncake (milliseconds, blocks of 512
tokens; github.com/kvcache-ai/Mooncake) and with the Qwen-Bailian traces (seconds, blocks of 16 tokens, `chat_id`;
github.com/alibaba-edu/qwen-bailian-usagetraces-anon).

The made-up traces are sized for a 12 GB card: prompts of some hundred to some thousand tokens, a request or two a second.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """time: seconds since the trace began. num_prompt: how many of `blocks` are the prompt; the rest is the answer."""

    time: float
    blocks: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True)
class Trace:
    name: str
    block_tokens: int
    requests: list[Request]


class _Blocks:
    """Block numbers that no other text has."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def fresh(self, num_blocks: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, num_blocks))


def _lengths(rng: random.Random, median: float, spread: float = 0.7, most: int = 512) -> int:
    """Blocks of a piece of text: log-normal, as lengths of texts are."""
    return max(1, min(most, round(median * rng.lognormvariate(0.0, spread))))


def _zipf(rng: random.Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws 0 .. count - 1, number r with weight 1 / (r + 1) ** exponent."""
    cumulative = list(itertools.accumulate((r + 1) ** -exponent for r in range(count)))
    return lambda: rng.choices(range(count), cum_weights=cumulative)[0]


def _arrivals(rng: random.Random, rate: float, start: float = 0.0) -> Iterator[float]:
    while True:
        start += rng.expovariate(rate)
        yield start


def _single_turn(time: float, shared: tuple[int, ...], blocks: _Blocks, rng: random.Random) -> Request:
    """A shared beginning, a question of its own, an answer."""
    prompt = shared + blocks.fresh(_lengths(rng, 8))
    return Request(time, prompt + blocks.fresh(_lengths(rng, 8)), len(prompt))


def zipf(seed: int = 0, num_requests: int = 6000) -> Trace:
    """Single questions to 300 applications, each with its own system prompt; a few applications get most of the traffic."""
    rng, blocks = random.Random(seed), _Blocks()
    prompts = [blocks.fresh(_lengths(rng, 40)) for _ in range(300)]
    pick, clock = _zipf(rng, len(prompts), 0.9), _arrivals(rng, 2.0)
    requests = [_single_turn(next(clock), prompts[pick()], blocks, rng) for _ in range(num_requests)]
    return Trace("zipf", BLOCK_TOKENS, requests)


def chat(seed: int = 0, num_requests: int = 6000) -> Trace:
    """Conversations: each turn sends everything said before. Four turns on average, half a minute of thought in between."""
    rng, blocks = random.Random(seed), _Blocks()
    systems = [blocks.fresh(_lengths(rng, 20)) for _ in range(8)]
    pick, clock = _zipf(rng, len(systems), 1.0), _arrivals(rng, 0.5)
    requests: list[Request] = []
    while len(requests) < 1.2 * num_requests:
        time, said = next(clock), systems[pick()]
        while True:
            prompt = said + blocks.fresh(_lengths(rng, 6))
            said = prompt + blocks.fresh(_lengths(rng, 16))
            requests.append(Request(time, said, len(prompt)))
            if rng.random() < 0.25 or len(said) > 1500:
                break
            time += 5.0 + rng.lognormvariate(0.0, 1.0) * 30.0
    requests.sort(key=lambda request: request.time)
    return Trace("chat", BLOCK_TOKENS, requests[:num_requests])


def scan(seed: int = 0, num_requests: int = 6000) -> Trace:
    """Popular documents, and in between long sweeps over documents that nobody asks for twice."""
    rng, blocks = random.Random(seed), _Blocks()
    documents = [blocks.fresh(_lengths(rng, 60)) for _ in range(60)]
    pick, clock = _zipf(rng, len(documents), 0.6), _arrivals(rng, 2.0)
    requests = []
    for number in range(num_requests):
        sweeping = number % 150 >= 100  # 50 requests of 150 blocks: more than the cache holds
        shared = blocks.fresh(_lengths(rng, 150)) if sweeping else documents[pick()]
        requests.append(_single_turn(next(clock), shared, blocks, rng))
    return Trace("scan", BLOCK_TOKENS, requests)


def phases(seed: int = 0, num_requests: int = 9000) -> Trace:
    """Conversations, then popular documents with sweeps, then other applications: what was hot goes cold at once."""
    third = num_requests // 3
    requests: list[Request] = []
    shift = start = 0
    for index, make in enumerate((chat, scan, zipf)):
        part = make(seed + index, third).requests
        for request in part:
            blocks = tuple(block + shift for block in request.blocks)
            requests.append(Request(request.time + start, blocks, request.num_prompt))
        shift += 1 + max(max(request.blocks) for request in part)
        start += part[-1].time
    return Trace("phases", BLOCK_TOKENS, requests)


TRACES: dict[str, Callable[[int], Trace]] = {"zipf": zipf, "chat": chat, "scan": scan, "phases": phases}


def load(path: Path, block_tokens: int | None = None, limit: int | None = None) -> Trace:
    """A trace from a file of block hashes. Raises ValueError with the line for what isn't one.

    block_tokens: None means 16 for lines with `chat_id` (Qwen-Bailian), 512 for others (Mooncake). Times are seconds in the
    former, milliseconds in the latter. A last block that the prompt does not fill is left out, as it can't be shared.
    """
    requests: list[Request] = []
    numbers: dict[object, int] = {}
    size = block_tokens
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(requests) == limit:
                break
            if line.strip():
                record = _record(path, number, line)
                bailian = "chat_id" in record
                size = size or (16 if bailian else 512)
                hashes = record["hash_ids"][: record["input_length"] // size]
                blocks = tuple(numbers.setdefault(block, len(numbers)) for block in hashes)
                requests.append(
                    Request(record["timestamp"] * (1.0 if bailian else 1e-3), blocks, len(blocks))
                )
    if not requests:
        raise ValueError(
            f"{path} holds no requests: expected JSON lines with timestamp, input_length, hash_ids"
        )
    requests.sort(key=lambda request: request.time)
    return Trace(path.stem, size or BLOCK_TOKENS, requests)


def _record(path: Path, number: int, line: str) -> dict:
    try:
        record = json.loads(line)
        for field, kind in (("timestamp", (int, float)), ("input_length", int), ("hash_ids", list)):
            if not isinstance(record[field], kind):
                raise TypeError(f"{field} is {record[field]!r}")
    except (ValueError, KeyError, TypeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}, line {number}: {problem}; expected timestamp, input_length, hash_ids"
        ) from error
    return record
