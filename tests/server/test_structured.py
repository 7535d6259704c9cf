"""Structured output: what conforms, and what is refused at the door (case 13)."""

from __future__ import annotations

import json
import re

import pytest

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
GOOD = {
    "flat": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "recursive with a base case": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "nested defs": {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"enum": ["x"]},
        },
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "required": ["a"],
    },
    "array of refs": {
        "$defs": {"i": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        "type": "array",
        "minItems": 2,
        "maxItems": 3,
        "items": {"$ref": "#/$defs/i"},
    },
}
BAD = {
    "ref to itself": {"$ref": "#"},
    "ref cycle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "endless object": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "endless array": {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    "unknown type": {"type": "strnig"},
    "type is a number": {"type": 5},
    "dangling ref": {"$ref": "#/$defs/none"},
    "foreign ref": {"$ref": "https://example.com/schema.json"},
    "properties is a list": {"type": "object", "properties": [1]},
    "bad pattern": {"type": "string", "pattern": "(["},
    "nothing fits": {"enum": []},
    "cannot be enforced": {"not": {"type": "string"}},
}


def ask(server, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return server.chat("say", response_format=form)


@pytest.mark.parametrize("name", GOOD)
def test_answers_conform(server, name):
    answer = ask(server, GOOD[name])
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    if name == "flat":
        assert isinstance(value["a"], int)
    elif name == "array of refs":
        assert 2 <= len(value) <= 3
        assert all(isinstance(item["n"], int) for item in value)
    elif name == "nested defs":
        assert value == {"a": {"b": "x"}}
    else:
        assert set(value) == {"value", "next"}


@pytest.mark.parametrize("name", BAD)
def test_schemas_that_cannot_work_are_400(server, name):
    answer = ask(server, BAD[name])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format"
    assert ".cc:" not in error["message"]


def test_json_object_regex_and_grammar(server):
    value = server.chat("x", response_format={"type": "json_object"}).json()["choices"][0]["message"][
        "content"
    ]
    assert isinstance(json.loads(value), dict)
    text = server.chat("x", guided_regex="[0-9]{3}-(a|b)").json()["choices"][0]["message"]["content"]
    assert re.fullmatch("[0-9]{3}-(a|b)", text)
    text = server.complete("x", guided_grammar='root ::= "yes" | "no"', max_tokens=10).json()["choices"][0][
        "text"
    ]
    assert text in ("yes", "no")
    value = server.complete("x", guided_json={"type": "integer"}, max_tokens=10).json()["choices"][0]["text"]
    assert isinstance(json.loads(value), int)


def test_bad_regex_and_grammar_are_400(server):
    assert server.chat("x", guided_regex="([").status_code == 400
    assert server.chat("x", guided_regex="(?=a)b").status_code == 400
    assert server.chat("x", guided_grammar='root ::= "a').status_code == 400
    assert server.chat("x", guided_grammar="root ::= missing").status_code == 400
    assert server.chat("x", guided_json="{").status_code == 400
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    assert server.chat("x", **both).status_code == 400


def test_a_grammar_without_an_end_neither_hangs_nor_kills(server):
    answer = server.chat("x", guided_grammar="root ::= root", max_tokens=5)
    assert answer.status_code in (200, 400)
    assert server.chat("alive").json()["choices"][0]["message"]["content"] == "alive"


@pytest.mark.parametrize("options", [{}, {"open_thinking": True}])
def test_a_model_may_think_before_the_grammar_applies(server, options):
    text = "<think>no JSON here</think>" if not options else "no JSON here</think>"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": GOOD["flat"]}}
    fields = {"response_format": form, "chat_template_kwargs": options}
    message = server.chat(f"{text} nor here", **fields).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "no JSON here"
    assert isinstance(json.loads(message["content"])["a"], int)
    tools = [{"type": "function", "function": {"name": "look", "parameters": GOOD["flat"]}}]
    fields = {"tools": tools, "tool_choice": "required", "chat_template_kwargs": options}
    message = server.chat(f"{text} nor here", **fields).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "no JSON here"
    assert isinstance(json.loads(message["tool_calls"][0]["function"]["arguments"])["a"], int)


def test_without_thinking_the_grammar_applies_at_once(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": GOOD["flat"]}}
    for options in ({}, {"enable_thinking": False}):
        fields = {"response_format": form, "chat_template_kwargs": options}
        message = server.chat("plain text", **fields).json()["choices"][0]["message"]
        assert "reasoning_content" not in message
        assert isinstance(json.loads(message["content"])["a"], int)
