"""Anthropic's Messages API: blocks, events, counts, errors."""

from __future__ import annotations

import json

TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


def ask(server, text, **fields):
    body = {"model": "null", "max_tokens": 500, "messages": [{"role": "user", "content": text}], **fields}
    return server.http.post("/v1/messages", json=body)


def events(server, text, **fields):
    answer = ask(server, text, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    out = []
    for frame in answer.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        out.append(payload)
    return out


def rebuild(stream):
    """Blocks from events, checking that each is opened, filled and closed in order."""
    blocks, open_index = [], None
    for event in stream:
        if event["type"] == "content_block_start":
            assert open_index is None
            assert event["index"] == len(blocks)
            open_index = event["index"]
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            delta = dict(event["delta"])
            kind = delta.pop("type")
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                kind
            ]
            blocks[-1][key] = blocks[-1].get(key, "") + delta[key]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def test_text_answer_and_usage(server):
    answer = ask(server, "hello").json()
    assert answer["content"] == [{"type": "text", "text": "hello"}]
    assert (answer["stop_reason"], answer["role"], answer["type"]) == ("end_turn", "assistant", "message")
    assert answer["usage"]["output_tokens"] == 6
    assert ask(server, "hello", max_tokens=2).json()["stop_reason"] == "max_tokens"


def test_stop_sequence_is_named(server):
    answer = ask(server, "one two three", stop_sequences=["two"]).json()
    assert answer["content"][0]["text"] == "one "
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")


def test_thinking_is_shown_only_when_asked_for(server):
    shown = ask(server, "<think>hm</think>yes", thinking={"type": "enabled", "budget_tokens": 1024}).json()[
        "content"
    ]
    assert [block["type"] for block in shown] == ["thinking", "text"]
    assert shown[0]["thinking"] == "hm"
    # not asked for: the template closes the block, and whatever comes is the answer
    assert ask(server, "hm, yes").json()["content"] == [{"type": "text", "text": "hm, yes"}]
    assert ask(server, "hm </think> yes").json()["content"][0]["text"] == "hm </think> yes"


def test_streamed_blocks_equal_the_whole_answer(server):
    text = f"<think>why</think>I look.\n{CALL}"
    fields = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = ask(server, text, **fields).json()
    stream = events(server, text, **fields)
    blocks = rebuild(stream)
    for block in (*whole["content"], *blocks):
        block.pop("id", None)
    assert blocks == whole["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[-1]["input"] == {"at": "sky"}
    assert whole["stop_reason"] == "tool_use"
    assert stream[0]["type"] == "message_start"
    assert [e["type"] for e in stream[-2:]] == ["message_delta", "message_stop"]
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"
    assert stream[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_tool_results_and_system_become_messages(server):
    turns = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "blue"}]},
    ]
    body = {"model": "null", "system": "be brief", "messages": turns, "tools": TOOLS}
    count = server.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    answer = server.http.post("/v1/messages", json=body | {"max_tokens": 50}).json()
    assert answer["content"][0]["text"] == "blue"
    assert answer["usage"]["input_tokens"] == count


def test_forced_tool_is_called(server):
    answer = ask(server, "x", tools=TOOLS, tool_choice={"type": "any"}).json()
    assert answer["content"][0]["type"] == "tool_use"
    assert answer["content"][0]["name"] == "look"


def test_errors_have_anthropics_shape(server):
    answer = ask(server, "x", max_tokens=0)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    assert server.http.post("/v1/messages", json={"max_tokens": 5, "messages": image}).status_code == 400
    assert server.http.post("/v1/messages", json={"messages": []}).status_code == 400
