"""What of the teacher's writing is worth learning: plain characters, whole sentences, no talk about itself, no loops.

A model of 135M parameters often drifts or repeats itself. Dropping a text costs nothing, as the teacher writes faster than the
student can read; so every rule here simply drops, and only the tail of a text that ran out of room is mended.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from tokenizers import Tokenizer

#: Quotation marks, dashes, ellipsis and odd spaces to what a keyboard has.
_STRAIGHT = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: " - ", 0x2026: "..."}
_STRAIGHT |= {0x00A0: " ", 0x200B: "", 0x0009: " "}
#: Traces of the teacher's own role, of templates and of formats a plain text does not have.
_UNWANTED = re.compile(
    r"SmolLM|Hugging ?Face|\bAI\b|artificial intelligence|language model|the user\b|the prompt|as an assistant|I'm sorry, but|"
    r"here's an example of|rewritten|this (?:story|text|paragraph|sentence) (?:is|has|was)|https?:|www\.|"
    r"[\[\]{}<>|\\^~`_=#@]|\$\d",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z']+")
_SENTENCE_END = re.compile(r"[.!?][\"')]?(?=\s|$)")


@dataclass(frozen=True)
class Document:
    """One clean text. `cut` says that it ran out of room, so its end is no real ending."""

    kind: str
    prompt: str
    text: str
    cut: bool


def clean(kind: str, prompt: str, text: str, cut: bool) -> Document | None:
    """The text made fit for training, or None when it is not worth it."""
    text = text.translate(_STRAIGHT).replace("**", "").replace("*", "").strip()
    text = re.sub(
        r" +", " ", re.sub(r" *\n\s*", lambda m: "\n\n" if m.group().count("\n") > 1 else "\n", text)
    )
    if not text.isascii() or _UNWANTED.search(text):
        return None
    if cut:
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        if not ends:
            return None
        text = text[: ends[-1]]
    elif not _SENTENCE_END.search(text[-2:]):
        return None
    words = [word.lower() for word in _WORD.findall(text)]
    if len(words) < (50 if kind == "story" else 12) or (text[0] in "\"'.,;:!?-)" and kind != "dialogue"):
        return None
    if repeats(words) or _repeats_sentences(text) or (text.count('"') % 2 == 1 and not cut):
        return None
    return Document(kind, prompt, text, cut)


def repeats(words: list[str]) -> bool:
    """Whether a list of words runs in circles: a 5-gram four times, or too few different trigrams or words."""
    if len(words) < 8:
        return False
    fives = Counter(zip(*(words[i:] for i in range(5)), strict=False))
    if fives and fives.most_common(1)[0][1] > 3:
        return True
    trigrams = list(zip(*(words[i:] for i in range(3)), strict=False))
    return len(set(trigrams)) < 0.85 * len(trigrams) or len(set(words)) < min(0.33, 60 / len(words)) * len(
        words
    )


def _repeats_sentences(text: str) -> bool:
    sentences = [s.strip().lower() for s in re.split(r"[.!?\n]+", text) if len(s.strip()) > 15]
    return len(sentences) - len(set(sentences)) > 1


_tokenizer: Tokenizer | None = None  # of a worker process, set once by `start_worker`


def start_worker(tokenizer_path: str) -> None:
    """Give a worker process the teacher's tokenizer."""
    global _tokenizer
    _tokenizer = Tokenizer.from_file(tokenizer_path)


def clean_batch(batch: list[tuple[str, str, list[int], bool]]) -> list[Document]:
    """Decode and clean (kind, prompt, tokens, cut) texts in a worker process; the ones worth nothing are left out."""
    assert _tokenizer is not None, "start_worker did not run in this process"
    texts = _tokenizer.decode_batch([tokens for _, _, tokens, _ in batch], skip_special_tokens=True)
    cleaned = (
        clean(kind, prompt, text, cut) for (kind, prompt, _, cut), text in zip(batch, texts, strict=True)
    )
    return [document for document in cleaned if document is not None]
