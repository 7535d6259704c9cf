"""Anthropic's own Python client."""

from __future__ import annotations

import pytest

anthropic = pytest.importorskip("anthropic")

TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_message_and_count(client):
    done = client.messages.create(model="null", max_tokens=100, messages=user("hello"), system="be brief")
    assert done.content[0].text == "hello"
    assert done.stop_reason == "end_turn"
    count = client.messages.count_tokens(model="null", messages=user("hello"), system="be brief")
    assert count.input_tokens == done.usage.input_tokens


def test_stream_with_thinking_and_tools(client):
    text = f"<think>why</think>I look. {CALL}"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(
        model="null", max_tokens=2000, messages=user(text), tools=TOOLS, thinking=thinking
    ) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == "I look."
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"at": "sky"}
    assert final.stop_reason == "tool_use"


def test_errors_are_the_clients_own_classes(client, url):
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="null", max_tokens=0, messages=user("x"))
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=user("x"))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong").messages.create(
            model="null", max_tokens=5, messages=user("x")
        )
