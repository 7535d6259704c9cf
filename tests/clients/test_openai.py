"""OpenAI's own Python client."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest

openai = pytest.importorskip("openai")
from pydantic import BaseModel  # noqa: E402

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models(client):
    assert [m.id for m in client.models.list()] == ["null"]
    assert client.models.retrieve("null").max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(
        model="null", messages=user("héllo 🦊"), logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].message.content == "héllo 🦊"
    assert whole.usage.completion_tokens == len("héllo 🦊".encode()) + 1
    assert whole.choices[0].logprobs.content[0].token == "h"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="null", messages=user("héllo 🦊"), **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "héllo 🦊"
    assert chunks[-1].usage == whole.usage


def test_the_stream_helper_accumulates_tool_calls(client):
    with client.chat.completions.stream(
        model="null", messages=user(f"I look. {CALL}"), tools=TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "I look."
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"at": "sky"}


class Leg(BaseModel):
    length: int
    side: Literal["left", "right"]


class Animal(BaseModel):
    name: str
    legs: list[Leg]
    parent: Animal | None


def test_parse_with_nested_models(client):
    done = client.chat.completions.parse(model="null", messages=user("describe"), response_format=Animal)
    animal = done.choices[0].message.parsed
    assert isinstance(animal, Animal)


def test_completions(client):
    done = client.completions.create(
        model="null", prompt=["ab", "cd"], max_tokens=2, n=2, echo=True, logprobs=None
    )
    assert [c.text for c in done.choices] == ["abab", "abab", "cdcd", "cdcd"]
    pieces = client.completions.create(model="null", prompt="abcd", max_tokens=4, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == "abcd"


def test_responses(client):
    done = client.responses.create(model="null", input="hello", instructions="be brief")
    assert done.output_text == "hello"
    events = list(client.responses.create(model="null", input="hello", stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "hello"
    with client.responses.stream(
        model="null",
        input=f"so {CALL}",
        tools=[{"type": "function", **TOOLS[0]["function"], "strict": False}],
    ) as s:
        final = s.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    parsed = client.responses.parse(model="null", input="describe", text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)


def test_errors_are_the_clients_own_classes(client, url):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="null", messages=user("x"), temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="null", messages=user("x" * 9000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=user("x"))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def test_many_at_once_with_the_async_client(url):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            calls = (
                client.chat.completions.create(model="null", messages=user(f"number {i}")) for i in range(50)
            )
            return [done.choices[0].message.content for done in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [f"number {i}" for i in range(50)]
