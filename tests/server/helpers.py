"""What several test files ask of a running server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.server.bench_client import HttpStream


def pages(server) -> dict[str, float]:
    """The page counters of the engine, as of its last beat."""
    text = server.http.get("/metrics").text
    return {
        m[1]: float(m[2]) for m in re.finditer(r"^minisgl:kv_pages_(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    }


def metric(server, name: str) -> float:
    """One counter or gauge."""
    found = re.search(rf"^{name}(?:_total)?\{{.*\}} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def all_free(server) -> bool:
    """Whether nothing runs and no page is held."""
    return pages(server)["protected"] == 0 and metric(server, "vllm:num_requests_running") == 0


def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """Answers to many requests sent at the same time, each on its own connection; all must be 200."""

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        stream = await HttpStream.open(url, path, body)
        data = await stream.read()
        assert stream.status == 200, data
        return json.loads(data)

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(together())


def texts(answers: Sequence[dict[str, Any]]) -> list[str]:
    """The text of each answer's first choice."""
    return [answer["choices"][0]["text"] for answer in answers]
