"""Chunks: usage, tool calls, logprobs, several choices; a stream says what the whole answer says (cases 10
to 12).
"""

from __future__ import annotations

import json

import pytest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
ARGUMENTS = '{"at": "the \\"sky\\" 🌧", "deep": {"list": [1, 2, {}]}}'
CALLS = (
    f'I will.\n<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)


def body(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def rebuild(chunks: list[dict]) -> dict[int, dict]:
    """Messages as a client puts them together, checking the rules for deltas on the way."""
    out: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = out.setdefault(choice["index"], {"finish_reason": None, "logprobs": []})
            assert message["finish_reason"] is None, "nothing comes after the finish reason"
            delta = choice["delta"]
            assert ("role" in delta) == ("role" not in message)
            for field in ("role", "content", "reasoning_content"):
                if field in delta:
                    message[field] = message.get(field, "") + delta[field]
            indices = [call["index"] for call in delta.get("tool_calls", ())]
            assert len(indices) == len(set(indices)), "one entry an index a chunk"
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", {})
                if call["index"] in calls:
                    assert "id" not in call
                    assert "name" not in call["function"]
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    assert call["id"]
                    assert call["function"]["name"]
                    calls[call["index"]] = call
            message["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            message["finish_reason"] = choice["finish_reason"]
    return out


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_comes_once_if_and_only_if_asked_for(server, path):
    fields = body("hello") if "chat" in path else {"prompt": "hello"}
    plain = server.stream(path, fields)
    assert all("usage" not in chunk for chunk in plain)
    assert all(chunk["choices"] for chunk in plain)
    asked = server.stream(path, fields | {"stream_options": {"include_usage": True}})
    last = [chunk for chunk in asked if not chunk["choices"]]
    assert len(last) == 1
    assert last[0] is asked[-1]
    assert last[0]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in asked[:-1])
    steady = server.stream(
        path, fields | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in steady]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len([chunk for chunk in steady if not chunk["choices"]]) == 1


@pytest.mark.parametrize("max_tokens", [None, *range(5, 140, 9)])
def test_tool_calls_streamed_or_not_and_cut_anywhere(server, max_tokens):
    fields = body(CALLS, tools=TOOLS, max_tokens=max_tokens)
    whole = server.http.post("/v1/chat/completions", json=fields).json()["choices"][0]
    streamed = rebuild(server.stream("/v1/chat/completions", fields))[0]
    calls = [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert [call["function"] for call in streamed.get("tool_calls", {}).values()] == calls
    assert (streamed.get("content") or "") == (whole["message"]["content"] or "")
    assert streamed["finish_reason"] == whole["finish_reason"]
    if max_tokens is None:
        assert whole["finish_reason"] == "tool_calls"
        assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
            ("look", json.loads(ARGUMENTS)),
            ("wait", {}),
        ]
        assert whole["message"]["content"] == "I will."
    else:
        assert whole["finish_reason"] == "length"


def test_tool_choice_none_leaves_markers_in_the_text(server):
    answer = server.chat(CALLS, tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert answer["message"]["content"] == CALLS
    assert answer["finish_reason"] == "stop"


def test_forced_tools_give_valid_calls(server):
    required = server.chat("x", tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]
    assert required["content"] is None
    assert required["tool_calls"][0]["function"]["name"] == "look"
    assert isinstance(json.loads(required["tool_calls"][0]["function"]["arguments"]), dict)
    named = {"type": "function", "function": {"name": "wait"}}
    fields = body("x", tools=TOOLS, tool_choice=named)
    whole = server.http.post("/v1/chat/completions", json=fields).json()["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "wait"
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == {}
    streamed = rebuild(server.stream("/v1/chat/completions", fields))[0]
    assert streamed["tool_calls"][0]["function"] == whole["message"]["tool_calls"][0]["function"]
    assert streamed["finish_reason"] == whole["finish_reason"] == "tool_calls"
    unknown = {"type": "function", "function": {"name": "fly"}}
    assert server.chat("x", tools=TOOLS, tool_choice=unknown).status_code == 400


def test_where_reasoning_begins_is_decided_by_the_prompt(server):
    """The template closes the block for enable_thinking=false and may open it; a flag alone decides nothing."""

    def split(text, **options):
        message = server.chat(text, chat_template_kwargs=options).json()["choices"][0]["message"]
        return message.get("reasoning_content"), message["content"]

    assert split("<think>a</think>b") == ("a", "b")
    assert split("plain") == (None, "plain")
    assert split("answer", enable_thinking=False) == (None, "answer")
    assert split("a</think>b", open_thinking=True) == ("a", "b")
    assert split("never closed", open_thinking=True) == ("never closed", "")
    assert split("plain", enable_thinking=True) == (None, "plain")


def test_streamed_logprobs_equal_whole_ones(server):
    fields = body("né🌧 stop here", logprobs=True, top_logprobs=3, stop=["stop"])
    whole = server.http.post("/v1/chat/completions", json=fields).json()["choices"][0]["logprobs"]["content"]
    chunks = server.stream("/v1/chat/completions", fields)
    assert rebuild(chunks)[0]["logprobs"] == whole
    assert len(whole) == len("né🌧 stop".encode())
    assert all(len(entry["top_logprobs"]) == 3 for entry in whole)
    assert b"".join(bytes(entry["bytes"]) for entry in whole).decode() == "né🌧 stop"


def test_completion_logprobs_streamed_and_whole(server):
    fields = {"prompt": "abcd", "logprobs": 2, "max_tokens": 4}
    whole = server.http.post("/v1/completions", json=fields).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == list("abcd")
    assert whole["text_offset"] == [0, 1, 2, 3]
    assert all(len(top) == 2 for top in whole["top_logprobs"])
    parts = [chunk["choices"][0]["logprobs"] for chunk in server.stream("/v1/completions", fields)]
    assert {key: [x for part in parts for x in part[key]] for key in whole} == whole


def test_several_choices_and_prompts(server):
    answers = server.complete(["ab", "cd"], n=2, max_tokens=2).json()["choices"]
    assert [(a["index"], a["text"]) for a in answers] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    streamed = rebuild(server.stream("/v1/chat/completions", body("hey", n=3)))
    assert {index: m["content"] for index, m in streamed.items()} == {0: "hey", 1: "hey", 2: "hey"}


def test_echo_repeats_the_prompt(server):
    assert server.complete("ab", echo=True, max_tokens=2).json()["choices"][0]["text"] == "abab"
    chunks = server.stream("/v1/completions", {"prompt": "ab", "echo": True, "max_tokens": 2})
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abab"


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs_streamed_and_whole(server, max_tokens):
    fields = {"prompt": "aé🦊", "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    answer = server.http.post("/v1/completions", json=fields).json()
    whole, usage = answer["choices"][0], answer["usage"]
    num_prompt = len("aé🦊".encode())
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, max_tokens)
    assert (whole["text"], whole["finish_reason"]) == ("aé🦊" + "aé"[:max_tokens], "length")
    lists = whole["logprobs"]
    assert {len(items) for items in lists.values()} == {num_prompt + max_tokens}
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert all(len(top) in (1, 2) for top in lists["top_logprobs"][1:]), "two parts of a character look alike"
    assert lists["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4, 4][: num_prompt + max_tokens]
    chunks = server.stream("/v1/completions", fields)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert {key: [x for part in parts for x in part["logprobs"][key]] for key in lists} == lists


def test_several_prompts_are_echoed_each_with_its_own(server):
    choices = server.complete(["ab", "c"], echo=True, logprobs=0, max_tokens=1, n=2).json()["choices"]
    assert [c["text"] for c in choices] == ["aba", "aba", "cc", "cc"]
    assert [len(c["logprobs"]["tokens"]) for c in choices] == [3, 3, 2, 2]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b", "a"]


def test_no_new_tokens_only_with_echo(server):
    assert server.complete("ab", echo=True, max_tokens=0).json()["choices"][0]["text"] == "ab"
    assert server.complete("ab", max_tokens=0).status_code == 400
    assert server.complete("ab", echo=True, max_tokens=-1).status_code == 400


def test_ignore_eos_and_stop_tokens(server):
    endless = server.complete("ab", max_tokens=10, ignore_eos=True).json()["choices"][0]
    assert (endless["text"], endless["finish_reason"]) == ("abababab"[:9], "length") or endless[
        "finish_reason"
    ] == "length"
    token = server.http.post("/tokenize", json={"prompt": "c"}).json()["tokens"]
    stopped = server.complete("abcd", stop_token_ids=token).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("ab", "stop", token[0])


def test_max_completion_tokens_goes_before_max_tokens(server):
    answer = server.chat("abcdef", max_completion_tokens=2, max_tokens=4).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("ab", "length")
    assert server.chat("abcdef", max_tokens=4).json()["choices"][0]["message"]["content"] == "abcd"


def test_reasoning_effort_reaches_the_template(server):
    def prompt_tokens(**fields):
        return server.chat("x", **fields).json()["usage"]["prompt_tokens"]

    plain = prompt_tokens()
    assert prompt_tokens(reasoning_effort="high") == plain + len("high")
    both = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "minimal"}}
    assert prompt_tokens(**both) == plain + len("minimal")


def test_continue_the_last_message(server):
    fields = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far"}]}
    answer = server.http.post("/v1/chat/completions", json=fields | {"continue_final_message": True})
    assert answer.status_code == 200, answer.text
