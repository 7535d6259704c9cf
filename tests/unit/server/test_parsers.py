"""Parsers of model output: what each format means, and that no cut of the text changes it."""

# ruff: noqa: RUF001 (DeepSeek's markers are written with full-width bars)
from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.parsers import (
    ChainParser,
    Formats,
    OutputParser,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
    chat_parser,
    detect,
)
from minisgl.server.parsers.forced import NamedCallParser
from minisgl.server.parsers.harmony import HarmonyParser
from minisgl.server.parsers.marked import MistralParser, deepseek_parser
from minisgl.server.parsers.reasoning import ThinkParser, start_of
from minisgl.server.parsers.tools import HermesParser, JsonListParser


def run(parser: OutputParser, pieces: list[str]) -> dict[str, object]:
    """The whole answer, as a client that concatenates sees it."""
    answer: dict[str, object] = {"content": "", "reasoning": "", "calls": []}
    calls: list[list[str]] = []
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    for event in events:
        if isinstance(event, Text):
            answer["content"] += event.text  # pyright: ignore
        elif isinstance(event, Reasoning):
            answer["reasoning"] += event.text  # pyright: ignore
        elif isinstance(event, ToolStart):
            assert event.index == len(calls), "calls start in order, each once"
            calls.append([event.name, ""])
        elif isinstance(event, ToolArguments):
            calls[event.index][1] += event.text
    answer["calls"] = [(name, arguments) for name, arguments in calls]
    return answer


def llama() -> JsonListParser:
    return JsonListParser("<|python_tag|>", {"f", "g"})


Q = '{"name": "f", "arguments": {"a": "x}\\"]", "b": [1, {"c": null}]}}'
ARGS = '{"a": "x}\\"]", "b": [1, {"c": null}]}'

CASES: list[tuple[str, Callable[[], OutputParser], str, str, str, list[tuple[str, str]]]] = [
    ("hermes", HermesParser, f"Sure.\n<tool_call>\n{Q}\n</tool_call>", "Sure.", "", [("f", ARGS)]),
    (
        "hermes two",
        HermesParser,
        f'<tool_call>{Q}</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "g"}}\n</tool_call>\nDone. ',
        "Done. ",
        "",
        [("f", ARGS), ("g", "{}")],
    ),
    (
        "hermes not json",
        HermesParser,
        "a <tool_call>oops</tool_call> b",
        "a <tool_call>oops</tool_call> b",
        "",
        [],
    ),
    ("hermes no name", HermesParser, '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', "", []),
    ("hermes cut", HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1', "", "", [("f", '{"a": 1')]),
    ("hermes cut early", HermesParser, '<tool_call>{"name": "f', '<tool_call>{"name": "f', "", []),
    ("hermes no arguments", HermesParser, '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
    (
        "hermes string arguments",
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes plain", HermesParser, "a < b <tool and <tool_cal", "a < b <tool and <tool_cal", "", []),
    ("llama bare", llama, '{"name": "f", "parameters": {"a": 1}}', "", "", [("f", '{"a": 1}')]),
    (
        "llama tag",
        llama,
        'Let me look. <|python_tag|>{"name": "g", "parameters": {}}',
        "Let me look.",
        "",
        [("g", "{}")],
    ),
    (
        "llama two",
        llama,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        "",
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    ("llama json answer", llama, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', "", []),
    ("llama json answer 2", llama, '{"name": "f", "age": 3} ', '{"name": "f", "age": 3} ', "", []),
    ("llama list answer", llama, "[1, 2]", "[1, 2]", "", []),
    ("llama text", llama, "Hello there", "Hello there", "", []),
    (
        "mistral list",
        MistralParser,
        f'[TOOL_CALLS] [{Q}, {{"name": "g", "arguments": {{}}}}]',
        "",
        "",
        [("f", ARGS), ("g", "{}")],
    ),
    (
        "mistral new",
        MistralParser,
        f"Hm.[TOOL_CALLS]f[ARGS]{ARGS}[TOOL_CALLS]g[CALL_ID]1[ARGS]{{}}",
        "Hm.",
        "",
        [("f", ARGS), ("g", "{}")],
    ),
    ("mistral text", MistralParser, "[1] is not [TOOL", "[1] is not [TOOL", "", []),
    (
        "deepseek v3",
        deepseek_parser,
        f"Ok <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok",
        "",
        [("f", ARGS), ("g", "{}")],
    ),
    (
        "deepseek v3.1",
        deepseek_parser,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        [("f", ARGS)],
    ),
    (
        "deepseek cut",
        deepseek_parser,
        "<｜tool▁call▁begin｜>f<｜tool",
        "<｜tool▁call▁begin｜>f<｜tool",
        "",
        [],
    ),
    ("think", ThinkParser, "<think>\nhm, 1 < 2\n</think>\n\nYes.\n", "Yes.\n", "hm, 1 < 2", []),
    ("think open", lambda: ThinkParser("reasoning"), "hm\n</think>\n\nYes", "Yes", "hm", []),
    ("think closed", lambda: ThinkParser("content"), "\nNo <think> here", "No <think> here", "", []),
    ("think none", ThinkParser, " \nplain <think> later", " \nplain <think> later", "", []),
    ("think cut", ThinkParser, "<think>a b </thi", "", "a b </thi", []),
    ("think empty", ThinkParser, "<think>\n\n</think>\n\nx", "x", "", []),
    ("think half", ThinkParser, " <th", " <th", "", []),
    (
        "think and call",
        lambda: ChainParser(ThinkParser(), HermesParser()),
        f"<think>need f</think>\n\nCalling.\n<tool_call>\n{Q}\n</tool_call>",
        "Calling.",
        "need f",
        [("f", ARGS)],
    ),
    (
        "harmony",
        HarmonyParser,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        "Hi",
        "hm",
        [],
    ),
    (
        "harmony call",
        HarmonyParser,
        "<|channel|>analysis<|message|>need f<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{ARGS}",
        "",
        "need f",
        [("f", ARGS)],
    ),
    (
        "harmony two calls",
        HarmonyParser,
        "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant to=functions.g<|channel|>commentary"
        '<|message|>{"b": 2}<|call|>',
        "",
        "",
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    (
        "harmony preamble",
        HarmonyParser,
        "<|channel|>commentary<|message|>I will look.<|end|>",
        "I will look.",
        "",
        [],
    ),
    ("harmony none", HarmonyParser, "just text", "just text", "", []),
    ("harmony cut header", HarmonyParser, "<|channel|>ana", "", "", []),
    ("named", lambda: NamedCallParser("f"), ARGS, "", "", [("f", ARGS)]),
    ("required", JsonListParser, '[{"name": "f", "parameters": {"a": 1}}]', "", "", [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize(
    ("make", "text", "content", "reasoning", "calls"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_whole_text_and_single_characters_give_the_same(make, text, content, reasoning, calls):
    expected = {"content": content, "reasoning": reasoning, "calls": calls}
    assert run(make(), [text]) == expected
    assert run(make(), list(text)) == expected


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_no_cut_changes_the_answer(case, data):
    _, make, text, *_ = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(make(), pieces) == run(make(), [text])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_cut_off_anywhere_the_answer_is_the_same_streamed_or_not(case, data):
    _, make, text, *_ = case
    text = text[: data.draw(st.integers(0, len(text)))]
    assert run(make(), list(text)) == run(make(), [text])


FRAGMENTS = [
    " ",
    "\n",
    *[
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        '"name"',
        ":",
        '"f"',
        ",",
        '"arguments"',
        "[",
        "]",
        "x",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "analysis",
        "final",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "function",
        "```json",
        "`",
        ";",
    ],
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([c[1] for c in CASES]), st.lists(st.sampled_from(FRAGMENTS), max_size=25))
def test_nonsense_neither_raises_nor_depends_on_the_cut(make, fragments):
    text = "".join(fragments)
    assert run(make(), fragments) == run(make(), [text]) == run(make(), list(text))


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.integers() | st.text(max_size=8) | st.none() | st.lists(st.booleans()),
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_arguments_arrive_as_written(arguments):
    text = json.dumps({"name": "f", "arguments": arguments})
    answer = run(HermesParser(), list(f"<tool_call>{text}</tool_call>"))
    ((name, got),) = answer["calls"]  # pyright: ignore
    assert (name, json.loads(got)) == ("f", arguments)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", "either"),
        ("user says <think>\nassistant\n<think>\n", "reasoning"),
        ("assistant\n<think>\n\n</think>\n\n", "content"),
        ("<think> in the question <|assistant|>", "either"),
    ],
)
def test_where_an_answer_begins_is_read_off_the_prompt(prompt, start):
    assert start_of(prompt) == start


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("… <tool_call> … <think>", Formats("hermes", "think")),
        ("… <|channel|> …", Formats("harmony", "harmony")),
        ("… [TOOL_CALLS] …", Formats("mistral", "none")),
        ("… <｜tool▁calls▁begin｜> … </think>", Formats("deepseek", "think")),
        ("… <|python_tag|> …", Formats("llama3", "none")),
        ("plain", Formats("none", "none")),
    ],
)
def test_formats_are_recognised_by_the_template(template, formats):
    assert detect("auto", "auto", template) == formats
    assert detect("none", "none", template) == Formats("none", "none")


def test_without_tools_a_tool_marker_is_text():
    parser = chat_parser(Formats("hermes", "none"), "", ())
    assert run(parser, ["<tool_call>{}"])["content"] == "<tool_call>{}"
