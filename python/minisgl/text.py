"""Text from tokens, a few tokens at a time: detokenizing, stop strings, and the one wrapper around a Hugging
Face tokenizer.

A model emits tokens; people read characters. One character may span several tokens, one stop string several
more, so both `Detokenizer` and `StopMatcher` are small machines that hold back what is not decided yet and
say it later. Both give the same text however the stream is cut, which is what makes a streamed answer equal
to one that is not streamed.

Tokens become *bytes* through a table and the bytes go through an incremental UTF-8 decoder: constant work a
token. The other way, decoding a sliding window of ids again and again, costs far more and remains only
for tokenizers that are neither byte-level nor sentencepiece-like.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PLAIN_CLASSES = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)  # the same class, before and after transformers 5
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_WINDOW_LIMIT = (
    16  # ids held back at most by the window decoder: more than four invalid bytes are never a character
)


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies (GPT-2's): character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def undecided_tail(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of text with which some marker starts, without being the whole marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0


class StopMatcher:
    """Finds stop strings in a stream of text pieces, and never lets a part of one slip out.

    Of several stop strings the one completed first wins; of those completed by the same character, the
    longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self.stops = tuple(s for s in stops if s)
        self.include = include  # whether the matched string belongs to the text
        self.matched: str | None = None
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is now safe to show. After a match (`matched` is set) there is no more."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return piece
        text = self._held + piece
        ends = [(at + len(stop), -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end if self.include else end - len(self.matched)]
        keep = len(text) - undecided_tail(text, self.stops)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, once it is certain that no more comes."""
        held, self._held = self._held, ""
        return held


class TokenTable:
    """Token id -> bytes for one vocabulary, filled as tokens are met. Shared by all requests of a process.

    kind: "byte_level" (GPT-2, Llama 3, Qwen …), "sentencepiece" (Llama 2, Mistral, Gemma …) or "window" (the
    rest).
    """

    def __init__(self, backend: Any, special_ids: frozenset[int] = frozenset()):
        state = json.loads(backend.to_str())
        self.backend = backend  # a tokenizers.Tokenizer
        self.kind = _decoder_kind(state.get("decoder"))
        self.added: Mapping[int, str] = {t["id"]: t["content"] for t in state.get("added_tokens", ())}
        self.special_ids = (
            frozenset(t["id"] for t in state.get("added_tokens", ()) if t["special"]) | special_ids
        )
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text. Ids outside the vocabulary (padded embeddings have some) add
        nothing.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.kind == "byte_level":
            return b"".join(bytes([_ALPHABET[c]]) if c in _ALPHABET else c.encode() for c in token)
        if self.kind == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()


def _decoder_kind(decoder: dict[str, Any] | None) -> str:
    steps = (decoder or {}).get("decoders") or [decoder or {}]
    names = {step.get("type") for step in steps}
    replaces_underline = any(
        s.get("type") == "Replace" and s.get("pattern") == {"String": "▁"} for s in steps
    )
    if "ByteLevel" in names:
        return "byte_level"
    return "sentencepiece" if "Metaspace" in names or replaces_underline else "window"


class Detokenizer:
    """Token ids of one request -> text pieces, whose concatenation is the whole text.

    Special tokens are skipped, except those in `keep` (a parser needs to see its markers); keep=None keeps
    all.
    at_start: the tokens are a text of their own rather than a continuation, so the space that sentencepiece
    puts in front of the first word is dropped.
    """

    def __init__(self, table: TokenTable, keep: frozenset[int] | None = frozenset(), at_start: bool = False):
        self._table = table
        self._skip = frozenset() if keep is None else table.special_ids - keep
        self._strip_space = at_start and table.kind == "sentencepiece"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # "window" kind only: ids from which the next piece is decoded
        self._shown = ""  # what of the window has been given out

    def feed(self, token_id: int) -> str:
        """The characters that this token completes: often one word, sometimes nothing."""
        if token_id in self._skip:
            return ""
        if self._table.kind == "window":
            return self._feed_window(token_id)
        data = self._table.token_bytes(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The pieces of several tokens, joined."""
        return "".join(map(self.feed, token_ids))

    def finish(self) -> str:
        """What is held back at the end: U+FFFD for an incomplete character, usually nothing."""
        if self._table.kind == "window":
            tail = self._decode_window()[len(self._shown) :]
            self._window, self._shown = [], ""
            return tail
        return self._decoder.decode(b"", final=True)

    def _decode_window(self) -> str:
        return self._table.backend.decode(self._window, skip_special_tokens=False)

    def _feed_window(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode_window()
        if text.endswith(_REPLACEMENT) and len(self._window) < _WINDOW_LIMIT:
            return ""
        piece = text[len(self._shown) :]
        self._window = self._window[
            -1:
        ]  # the last id stays as context: it decides about a space before the next
        self._shown = self._decode_window()
        return piece


def _json_file(folder: str, name: str) -> dict[str, Any]:
    """A JSON file of a model's folder; {} where there is none."""
    path = Path(folder, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _hugging_face_tokenizer(folder: str) -> Any:
    """The tokenizer that transformers' AutoTokenizer would choose.

    Importing transformers takes a second, and AutoTokenizer, which brings torch and the configurations of all models, two more.
    So neither is imported by who only counts tokens, and where the folder itself says that its tokenizer.json is everything,
    the plain class is asked directly.
    """
    if _json_file(folder, "tokenizer_config.json").get("tokenizer_class") in _PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class Tokenizer:
    """A Hugging Face tokenizer with the few calls an engine needs, safe to use from several threads.

    Encoding calls the Rust tokenizer itself: transformers' own call sets truncation on shared state, which
    two threads must not.
    """

    def __init__(self, hf: Any, extra_eos: Sequence[int] = ()):
        self.hf = hf
        self.backend = hf.backend_tokenizer
        self.table = TokenTable(self.backend, frozenset(hf.all_special_ids))
        own_eos = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_token_ids = frozenset([*own_eos, *extra_eos])
        self.bos_token_id: int | None = hf.bos_token_id
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, self.backend.get_vocab()), default=1)

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """From a model's folder. ValueError when there is none, or only one without a fast (Rust) form."""
        try:
            hf = _hugging_face_tokenizer(path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no tokenizer at {path!r}: give a folder with tokenizer.json ({error})"
            ) from error
        if not getattr(hf, "is_fast", False):
            raise ValueError(
                f"the tokenizer at {path!r} has no tokenizer.json; convert it with transformers first"
            )
        eos = _json_file(path, "generation_config.json").get("eos_token_id")
        return cls(hf, [eos] if isinstance(eos, int) else eos or ())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the begin token where the model wants one and add_special_tokens is set."""
        # the batch form without offsets is the one that holds the interpreter lock least
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids on their own."""
        detokenizer = self.detokenizer(frozenset() if skip_special_tokens else None, at_start=True)
        return detokenizer.feed_all(token_ids) + detokenizer.finish()

    def detokenizer(self, keep: frozenset[int] | None = frozenset(), at_start: bool = False) -> Detokenizer:
        """A new machine for one request; see `Detokenizer`."""
        return Detokenizer(self.table, keep, at_start)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, for log-probability listings: text (U+FFFD for part of a character) and bytes."""
        data = self.table.token_bytes(token_id)
        return data.decode("utf-8", "replace"), data

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, such as "</think>"; None if the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. ValueError, with the template's own words, when it refuses the
        messages.
        """
        if template is None and not self.hf.chat_template:
            raise ValueError(
                "this model has no chat template: use plain completions, or give a chat template"
            )
        reserved = {"conversation", "messages", "tools", "chat_template", "tokenize", "return_dict"} & set(
            options or ()
        )
        if reserved:
            raise ValueError(f"chat template option {min(reserved)!r} is set by the request itself")
        arguments: dict[str, Any] = {"add_generation_prompt": add_generation_prompt} | dict(options or {})
        try:
            return self.hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=template,
                tokenize=False,
                **arguments,
            )
        except Exception as error:  # a template is a program of its own: it raises whatever it likes
            raise ValueError(f"the chat template refuses these messages: {error}") from error
