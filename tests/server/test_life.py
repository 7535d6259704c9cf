"""Coming, going and dying: disconnects, aborts, draining, keys, timeouts, a dead engine (cases 14, 15, 20)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest

from minisgl.server.bench_client import HttpStream
from tests.server.helpers import all_free, metric, pages, until

SLOW = {"null": {"step_seconds": 0.01}}


@pytest.fixture(scope="module")
def keyed(start_server):
    """A server that takes 10 ms a step, so that there is time to leave."""
    with start_server(server={"api_key": "secret", "cors_origins": ["http://page"]}, **SLOW) as server:
        server.http.headers["authorization"] = "Bearer secret"
        yield server


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_within_a_second(keyed, stream):
    body = json.dumps({"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", keyed.port)) as raw:
        raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert until(lambda: pages(keyed)["protected"] > 0, 3)
        if stream:
            assert raw.recv(100)
    # a beat comes every half second, so half of this second is ours
    assert until(lambda: all_free(keyed), 1.0)


def test_streams_dropped_at_random_moments(start_server):
    """200 streams, 20 times."""
    rng = random.Random(7)

    async def drop(url: str) -> None:
        body = {"prompt": "hello " * 5, "max_tokens": 400, "ignore_eos": True, "stream": True}
        leave = asyncio.get_running_loop().time() + rng.random() * 0.2
        stream = await HttpStream.open(url, "/v1/completions", body)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(stream), max(0.0, leave - asyncio.get_running_loop().time()))
        stream.close()

    async def read(stream: HttpStream) -> None:
        async for _ in stream.chunks():
            pass

    async def many(url: str) -> None:
        await asyncio.gather(*(drop(url) for _ in range(200)))

    with start_server(**SLOW) as server:
        total = sum(pages(server).values())
        for _ in range(20):
            asyncio.run(many(server.url))
            assert server.http.get("/health").status_code == 200
            assert sum(pages(server).values()) == total
        assert until(lambda: all_free(server), 3)
        assert sum(pages(server).values()) == total
        assert server.chat("well").json()["choices"][0]["message"]["content"] == "well"


def test_abort_ends_an_answer_with_what_there_is(keyed):
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with keyed.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert keyed.http.post("/abort", json={"request_id": request_id}).json() == {"aborted": 1}
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert keyed.http.post("/abort", json={"request_id": "unknown"}).json() == {"aborted": 0}
    assert keyed.http.post("/abort", json={}).status_code == 400


def test_the_key_is_asked_for_where_it_matters(keyed):
    with httpx.Client(base_url=keyed.url) as client:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert client.get(path).status_code == 200, path
        for path in ("/v1/models", "/openapi.json"):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200


def test_cors_for_the_page_named(keyed):
    ask = {"origin": "http://page", "access-control-request-method": "POST"}
    answer = keyed.http.options("/v1/chat/completions", headers=ask)
    assert answer.headers["access-control-allow-origin"] == "http://page"
    other = keyed.http.options("/v1/chat/completions", headers=ask | {"origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


def test_every_answer_has_a_request_id(keyed):
    assert keyed.http.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(keyed.http.get("/nowhere").headers["x-request-id"]) == 32


def test_metrics_have_the_names_dashboards_know(keyed):
    keyed.chat("count me")
    assert until(lambda: metric(keyed, "minisgl:link_bytes") > 0, 3)
    assert metric(keyed, "minisgl:expert_cache_hit_rate") == 0.75
    assert metric(keyed, "minisgl:experts_used") > 0
    assert metric(keyed, "minisgl:link_bytes") == 1000 * metric(keyed, "minisgl:expert_cache_misses")
    text = keyed.http.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_count",
        'vllm:request_success_total{finished_reason="stop"',
        "minisgl:expert_cache_hit_rate",
        "minisgl:link_bytes_total",
        "minisgl:experts_used",
    ):
        assert name in text, name


def start_stream(server, tokens: int) -> tuple[threading.Thread, list[str]]:
    """A stream of so many tokens, read in a thread; returns once it has begun."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        client = httpx.Client(base_url=server.url, timeout=30)
        with client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()
        begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(10)
    return thread, lines


def test_sigterm_lets_streams_finish_and_takes_no_more(start_server):
    with start_server(server={"shutdown_timeout": 20}, **SLOW) as server:
        thread, lines = start_stream(server, 100)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.http.get("/ready").status_code == 503, 2)
        assert server.http.get("/health").status_code == 200
        refused = server.chat("x")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert server.process.wait(20) == 0
        thread.join()
        assert "data: [DONE]" in lines
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
        assert "".join(texts).count("x") >= 50


def test_a_second_sigterm_forces(start_server):
    with start_server(server={"shutdown_timeout": 60}, **SLOW) as server:
        thread, lines = start_stream(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.http.get("/ready").status_code == 503, 2)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 2
        assert time.monotonic() - began < 8
        thread.join()
        assert any('"shutdown"' in line for line in lines)


def test_the_drain_time_is_kept(start_server):
    with start_server(server={"shutdown_timeout": 0.5}, **SLOW) as server:
        thread, lines = start_stream(server, 4000)
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < 8
        thread.join()
        assert any('"shutdown"' in line for line in lines)


def test_slow_requests_time_out_and_a_dead_engine_is_told_to_everybody(start_server, tokenizer_folder):
    with open(f"{tokenizer_folder}/null.json") as file:
        fail_token = json.load(file)["separator"]
    null = {"step_seconds": 0.01, "fail_token": fail_token}
    with start_server(server={"request_timeout": 1.5}, null=null) as server:
        endless = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=endless)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_timeout")
        streamed = server.http.post("/v1/completions", json=endless | {"stream": True}).text
        assert "request_timeout" in streamed
        assert streamed.endswith("data: [DONE]\n\n")

        thread, lines = start_stream(server, 4000)
        answer = server.chat("every chat prompt kills this engine")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_dead"
        assert "made to fail" in answer.json()["error"]["message"]
        assert server.process.wait(20) == 1
        thread.join()
        assert any('"engine_dead"' in line for line in lines)


def test_not_ready_while_loading(start_server, free_port, tmp_path):
    loaded = tmp_path / "loaded"
    settings = {"server": {"port": free_port}, "null": {"load_file": str(loaded)}}
    with start_server(wait=False, **settings) as server:

        def state() -> int:
            try:
                return server.http.get("/ready").status_code
            except httpx.TransportError:
                return 0

        assert until(lambda: state() == 503, 20)
        assert server.http.get("/health").status_code == 200
        refused = server.chat("x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        loaded.touch()
        assert until(lambda: state() == 200, 5)
        assert server.chat("x").status_code == 200
        assert server.stop() == 0


def engine_of(server) -> psutil.Process:
    """The engine process, as soon as there is one: the child that is not multiprocessing's resource tracker."""
    found: list[psutil.Process] = []

    def look() -> bool:
        children = psutil.Process(server.process.pid).children()
        found[:] = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        return bool(found)

    assert until(look, 20)
    return found[0]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_its_server(start_server, number):
    with start_server() as server:
        engine = engine_of(server)
        code = server.stop(number)
        assert "leaked" not in "".join(server.log)
        assert code == (0 if number == signal.SIGTERM else -number)
        assert until(lambda: is_gone(engine), 5)


def test_no_engine_loads_for_a_server_that_is_gone(start_server, free_port, tmp_path):
    settings = {"server": {"port": free_port}, "null": {"load_file": str(tmp_path / "never")}}
    with start_server(wait=False, **settings) as server:
        engine = engine_of(server)
        time.sleep(1.0)  # past its imports
        server.stop(signal.SIGKILL)
        assert until(lambda: is_gone(engine), 10)


def test_a_taken_port_is_told_at_once(start_server, keyed):
    with start_server(wait=False, server={"port": keyed.port}) as server:
        assert server.process.wait(30) == 1
        assert until(lambda: "choose another --port" in "".join(server.log), 5)
