"""OpenAI's Responses API: items, events, function calls, and what is refused."""

from __future__ import annotations

import json

TOOLS = [
    {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


def ask(server, question, **fields):
    return server.http.post("/v1/responses", json={"model": "null", "input": question, **fields})


def events(server, text, **fields):
    answer = ask(server, text, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    payloads = [json.loads(f.split("\ndata: ")[1]) for f in answer.text.strip().split("\n\n")]
    assert [p["sequence_number"] for p in payloads] == list(range(len(payloads)))
    return payloads


def test_text_answer(server):
    answer = ask(server, "hello", instructions="be brief").json()
    assert answer["status"] == "completed"
    assert answer["output"][0]["content"][0]["text"] == "hello"
    assert (
        answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    )
    cut = ask(server, "hello", max_output_tokens=2).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_streamed_items_equal_the_whole_answer(server):
    text = f"<think>why</think>I look.\n{CALL}"
    whole = ask(server, text, tools=TOOLS).json()
    stream = events(server, text, tools=TOOLS)
    assert [e["type"] for e in stream[:2]] == ["response.created", "response.in_progress"]
    assert stream[-1]["type"] == "response.completed"
    done = [e["item"] for e in stream if e["type"] == "response.output_item.done"]
    assert done == stream[-1]["response"]["output"]

    def core(items):
        keys = ("type", "content", "name", "arguments", "status")
        return [{key: item[key] for key in keys if key in item} for item in items]

    assert core(done) == core(whole["output"])
    assert [i["type"] for i in done] == ["reasoning", "message", "function_call"]
    text_deltas = "".join(e["delta"] for e in stream if e["type"] == "response.output_text.delta")
    assert text_deltas == "I look."
    arguments = "".join(e["delta"] for e in stream if e["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"at": "sky"}


def test_a_call_and_its_output_go_back_in(server):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "blue"},
    ]
    assert ask(server, items).json()["output"][0]["content"][0]["text"] == "blue"


def test_structured_text(server):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = ask(server, "x", text={"format": {"type": "json_schema", "name": "n", "schema": schema}}).json()
    assert isinstance(json.loads(answer["output"][0]["content"][0]["text"])["n"], int)


def test_what_needs_a_memory_is_refused(server):
    answer = ask(server, "x", previous_response_id="resp-1")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"
    assert ask(server, [{"type": "item_reference", "id": "x"}]).status_code == 400
    assert ask(server, "x", tools=[{"type": "web_search"}]).status_code == 400
    assert ask(server, []).status_code == 400
