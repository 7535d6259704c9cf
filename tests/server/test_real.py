"""The real engine behind the server: pages, prefixes, preemption, sameness (cases 14 to 19), on the bundled demo model."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket

import pytest

from minisgl.server.bench_client import HttpStream
from tests.server.helpers import all_free, ask_all, metric, pages, texts, until

STORY = "Once upon a time, there was a little fox who lived at the edge of a big forest. "


def body(prompt: str, tokens: int = 12, **fields) -> dict:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_within_a_second(demo, stream):
    total = sum(pages(demo).values())
    data = json.dumps(body(STORY, 900, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", demo.port)) as raw:
        raw.sendall(head.encode() + data)
        assert until(lambda: pages(demo)["protected"] > 0, 5)
        if stream:
            assert raw.recv(100)
    assert until(lambda: all_free(demo), 1.2)  # a beat, which tells us, comes every half second
    assert sum(pages(demo).values()) == total


def test_streams_dropped_at_random_moments_leave_the_pages_balanced(demo):
    total = sum(pages(demo).values())
    rng = random.Random(3)

    async def drop(number: int) -> None:
        stream = await HttpStream.open(
            demo.url, "/v1/completions", body(f"{STORY}{number}", 200, stream=True)
        )
        try:
            await asyncio.wait_for(_drain(stream), rng.random() * 0.6)
        except asyncio.TimeoutError:
            pass
        finally:
            stream.close()

    async def many() -> None:
        await asyncio.gather(*map(drop, range(40)))

    for _ in range(2):
        asyncio.run(many())
        assert demo.http.get("/health").status_code == 200
        assert until(lambda: all_free(demo), 5)
        assert sum(pages(demo).values()) == total
    assert demo.complete(STORY, max_tokens=4, temperature=0).status_code == 200


async def _drain(stream: HttpStream) -> None:
    async for _ in stream.chunks():
        pass


def test_cold_warm_and_serial_are_the_same_text(demo):
    prompt = "The fresh prompt of this test " + STORY * 3
    before = metric(demo, "vllm:prefix_cache_hits")
    cold = demo.complete(**body(prompt, 16)).json()
    warm = [demo.complete(**body(prompt, 16)).json() for _ in range(2)]
    assert texts(warm) == texts([cold]) * 2
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm[0]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert until(lambda: metric(demo, "vllm:prefix_cache_hits") > before, 2)


def test_streamed_and_whole_real_answers_are_the_same(demo):
    chat = {
        "messages": [{"role": "user", "content": "Tell me about a fox."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    chat |= {"logprobs": True, "top_logprobs": 2}
    whole = demo.http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    chunks = demo.stream("/v1/chat/completions", chat)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole["message"]["content"]
    logprobs = [x for c in chunks for x in c["choices"][0]["logprobs"]["content"]]
    assert [x["token"] for x in logprobs] == [x["token"] for x in whole["logprobs"]["content"]]
    assert [x["logprob"] for x in logprobs] == pytest.approx(
        [x["logprob"] for x in whole["logprobs"]["content"]], abs=1e-4
    )


def test_echoed_logprobs_are_those_of_generating(demo):
    """A continuation scored as a prompt, in one piece and with a warm cache, has the log-probabilities it was chosen with."""
    made = demo.complete(**body(STORY, 12, logprobs=1)).json()
    prompt = demo.http.post("/tokenize", json={"prompt": STORY}).json()["tokens"]
    text = STORY + made["choices"][0]["text"]
    assert demo.http.post("/tokenize", json={"prompt": text}).json()["count"] == len(prompt) + 12
    scored = demo.complete(text, echo=True, logprobs=1, max_tokens=0).json()
    found, chosen = scored["choices"][0]["logprobs"], made["choices"][0]["logprobs"]
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert found["tokens"][-12:] == chosen["tokens"]
    assert found["token_logprobs"][-12:] == pytest.approx(chosen["token_logprobs"], abs=1e-3)
    assert [max(top.values()) for top in found["top_logprobs"][-12:]] == found["token_logprobs"][-12:]
    offsets = [found["text_offset"][i] - found["text_offset"][-12] for i in range(-12, 0)]
    assert offsets == chosen["text_offset"]


def test_seeds_repeat_and_differ(demo):
    def say(seed: int) -> str:
        fields = {"max_tokens": 16, "temperature": 1.0, "seed": seed, "ignore_eos": True}
        return demo.complete(STORY, **fields).json()["choices"][0]["text"]

    assert say(1) == say(1)
    assert say(1) != say(2)
    two = demo.complete(STORY, max_tokens=16, temperature=1.0, seed=1, n=2, ignore_eos=True).json()["choices"]
    assert two[0]["text"] == say(1)
    assert two[1]["text"] == say(2)


def test_sampling_parameters_do_what_they_say(demo):
    """Whatever leaves the likeliest token alone is greedy; biases and penalties change what is likeliest."""
    greedy = demo.complete(**body(STORY, 8)).json()["choices"][0]["text"]

    def say(**fields) -> str:
        answer = demo.complete(**body(STORY, 8) | {"temperature": 2.0} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert say(top_k=1) == say(top_p=1e-6) == say(min_p=1.0) == say(temperature=0) == greedy
    assert len({say(seed=seed) for seed in range(4)}) > 1
    token = demo.http.post("/tokenize", json={"prompt": " the"}).json()["tokens"]
    assert len(token) == 1
    assert say(logit_bias={str(token[0]): 100.0}, temperature=1.0) == " the" * 8

    def num_distinct(**fields) -> int:
        answer = demo.complete(**body(STORY, 40, logprobs=0) | fields).json()
        return len(set(answer["choices"][0]["logprobs"]["tokens"]))

    free = num_distinct()
    assert num_distinct(presence_penalty=100.0) == num_distinct(frequency_penalty=100.0) == 40 > free
    assert num_distinct(repetition_penalty=100.0) > free


def test_structured_output_of_a_real_model(demo):
    schema = {
        "type": "object",
        "properties": {
            "animal": {"enum": ["fox", "owl"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["animal", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = demo.chat("Describe an animal.", response_format=form, max_tokens=60, temperature=0).json()[
        "choices"
    ][0]
    value = json.loads(answer["message"]["content"])
    assert answer["finish_reason"] == "stop"
    assert value["animal"] in ("fox", "owl")
    assert 1 <= value["age"] <= 9


@pytest.fixture(scope="module")
def plain(start_demo):
    """One request at a time, no prefix cache, six of the experts of a layer in slots."""
    options = {"cache_type": "naive", "page_size": 1, "max_running_requests": 1}
    with start_demo(**options, moe_expert_offload=True, moe_expert_cache_size="6") as running:
        yield running


def test_identical_long_prompts_at_once_equal_a_run_without_prefix_cache(demo, plain):
    """Greedy texts of a small batch on this model do not depend on the batch; neither the prefix cache nor experts in host
    memory must change that."""
    prompts = [STORY * 5] * 6 + [f"{STORY * 5}The number is {i}" for i in range(6)]
    together = texts(ask_all(demo.url, [body(p) for p in prompts]))
    assert until(lambda: all_free(demo), 2)
    alone = [plain.complete(**body(p)).json()["choices"][0]["text"] for p in prompts]
    assert until(lambda: all_free(plain), 2)
    assert metric(plain, "vllm:prefix_cache_hits") == 0
    assert together == alone


def test_one_at_a_time_is_the_deterministic_mode(plain):
    prompts = [f"{i}. {STORY}" for i in range(6)]
    alone = texts([plain.complete(**body(p, 8)).json() for p in prompts])
    assert texts(ask_all(plain.url, [body(p, 8) for p in prompts])) == alone


def test_lower_priority_values_run_first(plain):
    ended: list[str] = []

    async def ask(name: str, priority: int, tokens: int) -> None:
        stream = await HttpStream.open(plain.url, "/v1/completions", body(STORY, tokens, priority=priority))
        await stream.read()
        ended.append(name)

    async def all_of_them() -> None:
        asked = [asyncio.create_task(ask("running", 0, 250))]  # longer than the others take to arrive
        for name, priority in (("late", 5), ("first", 0), ("urgent", -1)):
            await asyncio.sleep(0.1)  # the first one runs by now, and these arrive in this order
            asked.append(asyncio.create_task(ask(name, priority, 2)))
        await asyncio.gather(*asked)

    asyncio.run(all_of_them())
    assert ended == ["running", "urgent", "first", "late"]


def test_what_the_expert_cache_does_is_told(demo, plain):
    plain.complete(**body(STORY))
    assert until(lambda: 0 < metric(plain, "minisgl:expert_cache_hit_rate") < 1, 2)
    assert metric(plain, "minisgl:link_bytes") > 0
    assert metric(plain, "minisgl:experts_used") > 0
    seen = plain.http.get("/live/now").json()["experts"]
    assert base64.b64decode(seen["resident"]).count(1) == 6 * seen["layers"]
    assert metric(demo, "minisgl:link_bytes") == 0, "experts that have slots of their own do not travel"


def test_hundreds_of_requests_in_a_tiny_pool_are_preempted_and_right(demo, start_demo):
    prompts = [f"The {i}th animal said" for i in range(512)]
    with start_demo(num_pages=60, page_size=2, max_running_requests=16) as tiny:
        total = sum(pages(tiny).values())
        pressed = texts(ask_all(tiny.url, [body(p, 4) for p in prompts]))
        assert until(lambda: metric(tiny, "vllm:num_preemptions") > 0, 2), (
            "the pool was not tiny enough to matter"
        )
        assert until(lambda: all_free(tiny), 2)
        assert sum(pages(tiny).values()) == total
    sample = range(0, 512, 16)
    alone = [demo.complete(**body(prompts[i], 4)).json()["choices"][0]["text"] for i in sample]
    assert [pressed[i] for i in sample] == alone
