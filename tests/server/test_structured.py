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
