"""The demo's text: prompts, filter, human text, tokenizer, and the yardsticks."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from jinja2 import Template

from tools.demo.clean import Document, clean, repeats
from tools.demo.corpus import compose, encode, load_documents, read_sword, save_documents
from tools.demo.evaluate import ByteNgram, bz2_bits_per_byte, read_pieces, routing_balance
from tools.demo.prompts import TEMPLATES, draw_prompts
from tools.demo.tokenizer import CHAT_TEMPLATE, SPECIAL, chat_text, train_tokenizer

HELD_OUT = Path(__file__).parents[2] / "data" / "heldout.txt"
STORY = (
    "A fox lived near the old mill. Every evening he walked down to the river and looked at the lights of the town. One night "
    "a boat came by without anybody in it. The fox jumped in, because he was curious, and the water carried him past the "
    "houses and under the bridge. In the morning he woke up far away and smiled."
)


def test_prompts_vary_and_have_no_open_slots():
    prompts = draw_prompts(3000, seed=4)
    assert prompts == draw_prompts(3000, seed=4)
    assert len({prompt.text for prompt in prompts}) > 2700
    assert not any("{" in prompt.text for prompt in prompts)
    shares = Counter(prompt.kind for prompt in prompts)
    for kind, (weight, _) in TEMPLATES.items():
        assert abs(shares[kind] / 3000 - weight) < 0.04, kind
    assert sum(weight for weight, _ in TEMPLATES.values()) == pytest.approx(1.0)


def test_clean_keeps_a_good_text_and_straightens_it():
    document = clean("story", "p", "  " + STORY.replace("the old", "the “old”") + " ", cut=False)
    assert document == Document("story", "p", STORY.replace("the old", 'the "old"'), False)


def test_clean_cuts_an_unfinished_text_at_its_last_sentence():
    document = clean("story", "p", STORY + " And then he", cut=True)
    assert document is not None and document.text == STORY and document.cut


@pytest.mark.parametrize(
    "text",
    [
        STORY + " As an AI I like foxes.",
        STORY + " Dear [Your Name].",
        STORY + " 狐.",
        STORY + " And then he",
        STORY + " " + STORY,
        'She said "hello.' + STORY,
        "A fox ran.",
    ],
    ids=["about itself", "template", "script", "no ending", "said twice", "open quotation", "too short"],
)
def test_clean_drops(text):
    assert clean("story", "p", text, cut=False) is None


def test_loops_are_found():
    assert repeats(
        ["he", "told", "us", "about", "his", "song", "he", "told", "us", "about", "his", "hat"] * 3
    )
    assert not repeats(STORY.lower().split())


def test_documents_survive_the_archive(tmp_path):
    documents = [Document("story", "p", STORY, False), Document("letter", "q\n", "Dear Tom.", True)]
    save_documents(documents, tmp_path / "a.xz")
    assert list(load_documents([tmp_path / "a.xz"])) == documents


def test_sword_module_is_read(tmp_path):
    blocks = [
        "<title>Not this</title><verse>In the beginning<note>nor this</note> , there was light. It was good. </verse>"
        * 9,
        "And so on. " * 30,
    ]
    packed = [zlib.compress(block.encode()) for block in blocks]
    index = struct.pack(
        "<6I", 0, len(packed[0]), len(blocks[0]), len(packed[0]), len(packed[1]), len(blocks[1])
    )
    (tmp_path / "ot.bzs").write_bytes(index + struct.pack("<3I", 0, 0, 0))
    (tmp_path / "ot.bzz").write_bytes(b"".join(packed))
    pieces = read_sword(tmp_path, piece_chars=250)
    assert pieces[0].startswith("In the beginning, there was light. It was good. In the")
    assert "this" not in " ".join(pieces) and pieces[-1].endswith("And so on.")
    assert all(len(piece) < 300 for piece in pieces)


def test_cut_texts_never_become_conversations():
    documents = [Document("story", f"question {i}", f"answer {i}.", cut=i % 2 == 0) for i in range(400)]
    texts = compose(documents, ["human text."], seed=0)
    chats = [text for text in texts if text.startswith("<|im_start|>")]
    assert "human text.<|endoftext|>" in texts
    assert all(f"answer {i}." in "".join(texts) for i in range(400))
    assert not any(f"answer {i}." in "".join(chats) for i in range(0, 400, 2))
    assert all(text.endswith("<|im_end|>\n<|endoftext|>") for text in chats)


def test_tokenizer_reads_back_any_text_and_knows_its_special_tokens():
    tokenizer = train_tokenizer([STORY, *read_pieces(HELD_OUT)], vocab_size=400)
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    text = "Tabs\tand 12 naïve 狐 <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids[-1] == 2 and tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("12").ids == [tokenizer.token_to_id("1"), tokenizer.token_to_id("2")]
    stream = encode(tokenizer, [STORY, "ab"])
    assert stream.dtype == np.uint16 and tokenizer.decode(stream.tolist()) == STORY + "ab"


def test_chat_template_renders_what_was_trained_on():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert Template(CHAT_TEMPLATE).render(messages=messages) == chat_text(messages)
    prompt = Template(CHAT_TEMPLATE).render(messages=messages[:1], add_generation_prompt=True)
    assert chat_text(messages).startswith(prompt)


def test_ngram_is_a_distribution_and_learns():
    model = ByteNgram(b"abracadabra, abracadabra!", order=3)
    total = sum(
        2 ** -(2 * model.bits_per_byte(["a" + chr(byte)]) - model.bits_per_byte(["a"])) for byte in range(128)
    )
    assert total == pytest.approx(
        1 - 128 * 2 ** -(2 * model.bits_per_byte(["a\x00"]) - model.bits_per_byte(["a"])), abs=1e-9
    )
    assert model.bits_per_byte(["abracadabra"]) < 1.5 < model.bits_per_byte(["zzzz"])


def test_ngram_follows_witten_bell_by_hand():
    model = ByteNgram(b"aab", order=2)
    # order 1: a twice, b once, two kinds; order 2: a -> a once, a -> b once, two kinds
    first = {byte: (count + 2 / 256) / 5 for byte, count in (("a", 2), ("b", 1))}
    second = (1 + 2 * first["b"]) / 4
    expected = -(np.log2(first["a"]) + np.log2(second)) / 2
    assert model.bits_per_byte(["ab"]) == pytest.approx(expected)


def test_held_out_text_is_large_plain_and_in_pieces():
    pieces = read_pieces(HELD_OUT)
    assert HELD_OUT.stat().st_size >= 20_000 and len(pieces) == 16
    assert HELD_OUT.read_text().isascii()
    assert 2.0 < bz2_bits_per_byte(pieces) < 4.0


def test_routing_balance_of_even_and_collapsed_layers():
    even, collapsed = routing_balance(np.array([[5, 5, 5, 5], [20, 0, 0, 0]]))
    assert (even["entropy"], even["max"], even["min"]) == (pytest.approx(1.0), 1.0, 1.0)
    assert (collapsed["entropy"], collapsed["max"], collapsed["min"]) == (0.0, 4.0, 0.0)
