"""Text through the whole server: characters across tokens, stop strings, markers, empty prompts (cases 1 to
5).
"""

from __future__ import annotations

import pytest

TEXTS = [
    "plain",
    "🇩🇪🇯🇵 flags",
    "👩‍👩‍👧‍👦 family",
    "日本語と한국어",
    "e\u0301 a\u0308\u0323",
    "tabs\tand\nlines\n",
]


def joined(chunks: list[dict], field: str = "content") -> str:
    return "".join(c["choices"][0]["delta"].get(field, "") for c in chunks if c["choices"])


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_whole_text(server, text):
    whole = server.chat(text).json()["choices"][0]["message"]["content"]
    chunks = server.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    assert joined(chunks) == whole == text
    assert "\ufffd" not in whole
    assert all("\ufffd" not in joined([chunk]) for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"


def test_held_bytes_are_flushed_at_the_end(server):
    body = {"messages": [{"role": "user", "content": "ab€"}], "max_tokens": 4}
    assert joined(server.stream("/v1/chat/completions", body)) == "ab\ufffd"
    assert server.chat("ab€", max_tokens=4).json()["choices"][0]["message"]["content"] == "ab\ufffd"


def test_stop_string_across_tokens_is_not_sent(server):
    fields = {"stop": ["two th"]}
    chunks = server.stream(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}], **fields}
    )
    assert joined(chunks) == "one "
    assert chunks[-1]["choices"][0]["stop_reason"] == "two th"
    whole = server.chat("one two three", **fields).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("one ", "stop")
    included = server.chat("one two three", include_stop_str_in_output=True, **fields).json()["choices"][0]
    assert included["message"]["content"] == "one two th"
    assert server.chat("one two", stop=["wow", "o!"]).json()["choices"][0]["message"]["content"] == "one two"


def test_stop_strings_wait_for_min_tokens(server):
    answer = server.chat("a.b.c.d", stop=["."], min_tokens=4).json()["choices"][0]["message"]["content"]
    assert answer == "a.b"


def test_stop_with_token_id_prompts(server):
    ids = server.http.post("/tokenize", json={"prompt": "abc def"}).json()["tokens"]
    assert server.complete(ids, stop=" d", max_tokens=50).json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cannot_cut_a_marker(server, stream):
    """Markers are taken out first: "think" and "<" stop the answer, not the reasoning or the marker."""
    text = "<think>I think < hard</think>yes, think again"
    body = {"messages": [{"role": "user", "content": text}], "stop": ["think", "</"]}
    if stream:
        chunks = server.stream("/v1/chat/completions", body)
        content, reasoning = joined(chunks), joined(chunks, "reasoning_content")
    else:
        message = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        content, reasoning = message["content"], message["reasoning_content"]
    assert (reasoning, content) == ("I think < hard", "yes, ")


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content_is_empty_and_never_none(server, content):
    body = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": content}]}
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<|sep|>user: \n<|assistant|>"
    answer = server.http.post("/v1/chat/completions", json=body | {"max_tokens": 3})
    assert answer.status_code == 200, answer.text


def test_text_parts_are_flattened_and_others_refused(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"messages": [{"role": "user", "content": parts}]}
    answer = server.http.post("/v1/chat/completions", json=message).json()
    assert answer["choices"][0]["message"]["content"] == "a\nb"
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    refused = server.http.post("/v1/chat/completions", json=image)
    assert refused.status_code == 400
    assert "image_url" in refused.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [1]]])
def test_empty_prompts_are_400(server, prompt):
    answer = server.complete(prompt)
    assert answer.status_code == 400
    assert "empty" in answer.json()["error"]["message"]


def test_no_messages_is_400(server):
    answer = server.http.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_what_the_template_refuses_is_400_in_its_words(server):
    turns = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "c"},
    ]
    answer = server.http.post("/v1/chat/completions", json={"messages": turns})
    assert answer.status_code == 400
    assert "the system message must come first" in answer.json()["error"]["message"]
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert server.http.post("/v1/chat/completions", json={"messages": twice}).status_code == 200


def test_tokenize_and_detokenize_are_inverse(server):
    for text in TEXTS:
        answer = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == text
    assert server.http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert server.http.post("/detokenize", json={"tokens": [-1]}).status_code == 400
    assert server.http.post("/tokenize", json={}).status_code == 400


def test_what_a_client_needs_to_tokenize_by_itself(server):
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>"
    assert info["bos_token"] is None
    assert "enable_thinking" in info["chat_template"]
