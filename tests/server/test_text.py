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
