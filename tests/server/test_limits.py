"""What must be refused, and how: too long, too large, too many, not a number, wrong type (cases 6 to 9)."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest

from minisgl.server.bench_client import HttpStream


def check_error(answer: httpx.Response, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


def test_prompt_of_twice_the_context(server):
    error = check_error(server.complete("x" * 8192))
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    assert "8192" in error["message"]
    chat = check_error(server.chat("x" * 8192))
    assert chat["code"] == "context_length_exceeded"
    assert server.chat("next").json()["choices"][0]["message"]["content"] == "next"


def test_max_tokens_beyond_the_context(server):
    error = check_error(server.chat("x" * 4000, max_tokens=500))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert server.chat("x" * 4000).json()["usage"]["total_tokens"] == 4096  # the default is what is left


def test_ten_megabytes_do_not_stop_health(server):
    chat = json.dumps({"messages": [{"role": "user", "content": "word " * 2_000_000}]}).encode()
    ids = json.dumps({"prompt": [1] * 2_000_000}).encode()
    slowest, done = [0.0], threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not done.is_set():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                slowest[0] = max(slowest[0], time.perf_counter() - began)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        json_type = {"content-type": "application/json"}
        error = check_error(server.http.post("/v1/chat/completions", content=chat, headers=json_type))
        check_error(server.http.post("/v1/completions", content=ids, headers=json_type))
    finally:
        done.set()
        poller.join()
    assert error["code"] == "context_length_exceeded"
    assert slowest[0] < 1.0


def test_body_over_the_limit_is_413_with_and_without_length(server):
    check_error(server.http.post("/v1/completions", content=b"x" * (33 << 20)), 413)
    chunks = (b" " * (1 << 20) for _ in range(34))
    headers = {"content-type": "application/json"}
    check_error(server.http.post("/v1/completions", content=chunks, headers=headers), 413)


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"nan"', '"1"', "1e999", "true", "[1]"])
def test_what_is_no_number_is_400(server, field, value):
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
    answer = server.http.post(
        "/v1/chat/completions", content=body.encode(), headers={"content-type": "application/json"}
    )
    check_error(answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("seed", "7"),
        ("seed", -5),
        ("seed", 2**70),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 17),
        ("n", 10**30),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"1000000": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": "nan"}),
        ("logit_bias", {"5": 1e6}),
        ("top_logprobs", 5),
        ("messages", "x"),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [None]),
        ("stream", "yes"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("chat_template_kwargs", {"messages": []}),
        ("priority", "high"),
    ],
)
def test_values_out_of_range_or_type_are_400(server, field, value):
    check_error(server.chat("x", **{field: value}))


def test_huge_top_logprobs_is_400(server):
    check_error(server.chat("x", logprobs=True, top_logprobs=21))
    check_error(server.complete("x", logprobs=10**6))


@pytest.mark.parametrize("prompt", [[10**9], [-1], [5, 10**9], [1.5], [["x"]], None, 5, {"a": 1}])
def test_prompt_ids_out_of_the_vocabulary_are_400(server, prompt):
    check_error(server.complete(prompt))


def test_null_and_empty_parameters_are_as_if_absent(server):
    fields = {"stop": None, "logit_bias": {}, "tools": None, "seed": None, "n": None, "max_tokens": None}
    fields |= {
        "temperature": None,
        "stream": None,
        "stream_options": None,
        "response_format": None,
        "user": None,
    }
    answer = server.chat("fine", **fields, unknown_field={"x": [1]})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert server.chat("fine", stream=False).headers["content-type"] == "application/json"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"messages": [}'])
def test_bodies_that_are_no_request_are_400(server, body):
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/tokenize",
        "/abort",
    ):
        check_error(server.http.post(path, content=body, headers={"content-type": "application/json"}))
        check_error(server.http.post(path, content=body))


def test_deeply_nested_json_is_400(server):
    body = b'{"messages": ' + b"[" * 100_000
    check_error(
        server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    )


def test_unknown_places(server):
    check_error(server.http.get("/nowhere"), 404)
    check_error(server.http.get("/v1/models/other"), 404)
    assert check_error(server.chat("x", model="other"), 404)["code"] == "model_not_found"
    check_error(server.http.get("/v1/chat/completions"), 405)
    card = server.http.get("/v1/models/null").json()
    assert (card["id"], card["max_model_len"]) == ("null", 4096)
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "null"


@pytest.fixture(scope="module")
def small(start_server):
    """A server that takes 48 requests at a time."""
    with start_server(server={"max_open_requests": 48}, null={"step_seconds": 0.002}) as server:
        yield server


def test_a_thousand_requests_at_once(small):
    """Each is answered or told to come back; none is lost, and the server is well afterwards."""

    async def ask(number: int) -> int:
        body = {"prompt": f"number {number}", "max_tokens": 8}
        answer = await HttpStream.open(small.url, "/v1/completions", body)
        data = json.loads(await answer.read())
        if answer.status == 200:
            assert data["choices"][0]["text"] == f"number {number}"[:8]
        else:
            assert answer.headers["retry-after"] == "1"
            assert data["error"]["code"] == "queue_full"
        return answer.status

    async def ask_all() -> list[int]:
        return await asyncio.gather(*map(ask, range(1000)))

    codes = asyncio.run(ask_all())
    assert set(codes) <= {200, 503}
    assert codes.count(200) >= 48
    assert small.chat("well").json()["choices"][0]["message"]["content"] == "well"


def test_prompts_times_n_count_against_the_limit(small):
    assert small.complete(["a", "b"], n=2).status_code == 200
    check_error(small.complete(["a", "b", "c", "d"], n=16), 503)
    assert small.complete("a", n=16).status_code == 200
