"""The training text: the teacher's documents, a little human text, and the hand-written introductions; then token streams.

Human text is the World English Bible (Debian package sword-text-web, public domain), about one part in fifty. The other corpora
that packages carry were left out on purpose: they are technical, definitional, archaic, or under licences that say little about
models. No text is committed; what a run wrote is kept as xz-compressed JSON lines so that training can be repeated without
sampling again.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .clean import Document
from .prompts import IDENTITY
from .tokenizer import END_OF_TEXT, chat_text

IDENTITY_COPIES = 120
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You answer in simple words.",
)


def save_documents(documents: Iterable[Document], path: Path, preset: int = 3) -> None:
    """Write documents as JSON lines, xz-compressed."""
    with lzma.open(path, "wt", preset=preset, encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(document)) + "\n" for document in documents)


def load_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """Read what `save_documents` wrote."""
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield Document(**json.loads(line))


def read_sword(folder: Path, piece_chars: int = 1200) -> list[str]:
    """Plain text of a SWORD zText module: pieces of about `piece_chars` characters, cut between sentences.

    A module has one index of compressed blocks a testament, `*.bzs`: three little-endian u32 (offset, size, size unpacked) a
    block, into `*.bzz`, zlib. The markup is OSIS; notes and headings are dropped with their text.
    """
    pieces = []
    for index_path in sorted(folder.rglob("*.bzs")):
        index = np.fromfile(index_path, dtype="<u4").reshape(-1, 3)
        packed = index_path.with_suffix(".bzz").read_bytes()
        for offset, size, _ in index.tolist():
            if not size:
                continue
            markup = zlib.decompress(packed[offset : offset + size]).decode("utf-8", "replace")
            pieces += _pieces(_sentences(markup), piece_chars)
    return pieces


def _sentences(markup: str) -> list[str]:
    markup = re.sub(r"<(note|title)\b.*?</\1>", " ", markup, flags=re.DOTALL)
    straight = markup.translate({0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0x2014: " - "})
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", straight)).strip()
    sentences = re.split(r"(?<=[.!?]) ", re.sub(r" ([,.;:!?])", r"\1", text))
    return [sentence for sentence in sentences if sentence.isascii()]


def _pieces(sentences: list[str], piece_chars: int) -> list[str]:
    pieces, current = [], ""
    for sentence in sentences:
        current = f"{current} {sentence}".strip()
        if len(current) >= piece_chars:
            pieces.append(current)
            current = ""
    return [*pieces, current] if len(current) > 200 else pieces


def compose(documents: list[Document], human: list[str], seed: int) -> list[str]:
    """All training texts in random order, each ready to be encoded, special tokens spelled out.

    A finished text becomes a conversation three times in four and plain text otherwise; one that was cut off is always plain,
    as in a conversation its end would teach the model to stop in the middle. Every fourth conversation has a second turn,
    every tenth a system message.
    """
    rng = random.Random(seed)
    finished = [document for document in documents if not document.cut]
    texts = [document.text + END_OF_TEXT for document in documents if document.cut]
    texts += [piece + END_OF_TEXT for piece in human]
    pairs = [(document.prompt, document.text) for document in finished] + list(IDENTITY) * IDENTITY_COPIES
    rng.shuffle(pairs)
    while pairs:
        pair = pairs.pop()
        if rng.random() < 0.25:
            texts.append(pair[1] + END_OF_TEXT)
            continue
        turns = [pair, pairs.pop()] if pairs and rng.random() < 0.25 else [pair]
        messages = [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}] if rng.random() < 0.1 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        texts.append(chat_text(messages) + END_OF_TEXT)
    rng.shuffle(texts)
    return texts


def encode(tokenizer: Tokenizer, texts: list[str], batch: int = 8192) -> np.ndarray:
    """All texts as one uint16 stream of tokens."""
    parts = []
    for begin in range(0, len(texts), batch):
        encodings = tokenizer.encode_batch_fast(texts[begin : begin + batch], add_special_tokens=False)
        parts += [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]
    return np.concatenate(parts)
