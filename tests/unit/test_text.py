"""Detokenizing and stop strings: the same text however the stream is cut (properties, checked on random
input).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minisgl.models.registry import DEMO_FOLDER
from minisgl.text import StopMatcher, Tokenizer, TokenTable

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "naïve café 👩‍👩‍👧‍👦 日本語 한국어 e\u0301",
] * 8
HARD_TEXTS = [
    "🇩🇪🇯🇵 flags",
    "family 👩‍👩‍👧‍👦 and skin 👍🏽",
    "日本語と한국어와中文",
    "e\u0301 a\u0308\u0323 combining",
    " leading and trailing  ",
    "tab\tnewline\n\r\n",
]


def byte_level() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<think>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{b:02X}>": b + 2 for b in range(256)}
    for char in "▁Thequickbrownfx.":
        vocab.setdefault(char, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "the", "quick", "##er", "fox", "!"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="!")


BYTE_LEVEL = Tokenizer(byte_level())
SENTENCEPIECE = Tokenizer(sentencepiece())


def stream(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_pieces_join_to_the_text_and_never_show_half_a_character(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, at_start=True)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == tokenizer.hf.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(pieces).strip() == text.strip()


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_byte_level_round_trip(text: str):
    text = text.encode("utf-8", "ignore").decode()
    assert "".join(stream(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40))
def test_random_tokens_decode_as_their_bytes_do(ids: list[int]):
    table = BYTE_LEVEL.table
    whole = b"".join(table.token_bytes(i) for i in ids if i not in table.special_ids).decode(
        "utf-8", "replace"
    )
    assert "".join(stream(BYTE_LEVEL, ids)) == whole


def test_incomplete_character_is_held_and_flushed_at_the_end():
    euro = [SENTENCEPIECE.token_id(f"<0x{b:02X}>") for b in "€".encode()]
    pieces = stream(SENTENCEPIECE, euro[:2])  # pyright: ignore[reportArgumentType]
    assert pieces == ["", "", "\ufffd"]
    assert stream(SENTENCEPIECE, euro) == ["", "", "€", ""]  # pyright: ignore[reportArgumentType]


def test_special_tokens_are_skipped_unless_asked_for():
    end, think = BYTE_LEVEL.token_id("<|end|>"), BYTE_LEVEL.token_id("<think>")
    assert end is not None
    assert think is not None
    ids = [think, *BYTE_LEVEL.encode("fox"), end]
    assert "".join(stream(BYTE_LEVEL, ids)) == "fox"
    assert "".join(stream(BYTE_LEVEL, ids, keep=frozenset([think]))) == "<think>fox"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<think>fox<|end|>"


def test_sentencepiece_space_is_kept_in_a_continuation():
    ids = SENTENCEPIECE.encode("fox")
    assert "".join(stream(SENTENCEPIECE, ids)) == " fox"
    assert "".join(stream(SENTENCEPIECE, ids, at_start=True)) == "fox"


def test_other_tokenizers_go_through_a_window():
    tokenizer = Tokenizer(wordpiece())
    assert tokenizer.table.kind == "window"
    ids = tokenizer.encode("the quicker fox")
    assert "".join(stream(tokenizer, ids)) == "the quicker fox" == tokenizer.hf.decode(ids)


def test_ids_past_the_vocabulary_add_nothing():
    assert BYTE_LEVEL.table.token_bytes(10**6) == b""


def test_token_text_shows_bytes_of_partial_characters():
    first = TokenTable(BYTE_LEVEL.backend).token_bytes(BYTE_LEVEL.encode("🦊")[0])
    text, data = BYTE_LEVEL.token_text(BYTE_LEVEL.encode("🦊")[0])
    assert data == first == "🦊".encode()[: len(data)]
    assert text.endswith("\ufffd")


def run_matcher(stops: list[str], pieces: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops, include)
    shown = [matcher.feed(piece) for piece in pieces]
    return "".join(shown) + matcher.finish(), matcher.matched, shown


def oracle(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    stops: list[str], pieces: list[str], include: bool
):
    text, matched, _ = run_matcher(stops, pieces, include)
    assert (text, matched) == oracle(stops, "".join(pieces), include)
    # as early as possible: after each piece, what is held back is the start of some stop string
    matcher = StopMatcher(stops, include)
    sent = fed = ""
    for piece in pieces:
        sent, fed = sent + matcher.feed(piece), fed + piece
        if matcher.matched is not None:
            break
        held = fed[len(sent) :]
        assert held == "" or any(s.startswith(held) for s in stops)


def test_stop_string_across_tokens_is_never_sent():
    text, matched, shown = run_matcher(["STOP!"], ["go S", "TO", "P", "! more"], include=False)
    assert (text, matched, shown) == ("go ", "STOP!", ["go ", "", "", ""])
    assert run_matcher(["STOP!"], ["go S", "TO", "P", "! more"], include=True)[0] == "go STOP!"
    assert run_matcher(["STOP!"], ["go S", "TO"], include=False)[0] == "go STO"


def test_chat_template_errors_are_value_errors_with_the_templates_words():
    hf = byte_level()
    tokenizer = Tokenizer(hf)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    hf.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('system must come first') }}"
        "{% endif %}"
        "{{ m.content }}{% endfor %}{% if shout %}!{% endif %}"
    )
    with pytest.raises(ValueError, match="system must come first"):
        tokenizer.render_chat([{"role": "system", "content": "x"}])
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], options={"shout": True}) == "hi!"
    with pytest.raises(ValueError, match="'messages' is set by the request"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}], options={"messages": []})


def test_a_folder_without_tokenizer_says_so(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer at"):
        Tokenizer.load(str(tmp_path))


def test_end_tokens_come_from_tokenizer_and_generation_config(tmp_path):
    byte_level().save_pretrained(tmp_path)
    assert Tokenizer.load(str(tmp_path)).eos_token_ids == {BYTE_LEVEL.token_id("<|end|>")}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert Tokenizer.load(str(tmp_path)).eos_token_ids == {BYTE_LEVEL.token_id("<|end|>"), 5, 7}


def test_the_plain_class_is_what_transformers_would_choose():
    folder = str(DEMO_FOLDER)
    assert (
        json.loads(Path(folder, "tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )
    ours, theirs = Tokenizer.load(folder).hf, transformers.AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.all_special_ids == theirs.all_special_ids


def test_loading_such_a_tokenizer_leaves_torch_alone():
    code = f"""
import sys
from minisgl.text import Tokenizer
tokenizer = Tokenizer.load({str(DEMO_FOLDER)!r})
tokenizer.render_chat([{{"role": "user", "content": "hello"}}])
assert "torch" not in sys.modules
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
