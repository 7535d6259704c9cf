"""Structured output through xgrammar: what may be asked for, and the constraint that the scheduler advances.

`check_grammar` runs on the HTTP side before a request is accepted, so that a malformed or endless schema is
the client's 400 and not the engine's trouble. `GrammarFactory` runs in the engine process, where the
vocabulary is. xgrammar is imported at the first use: it brings torch, and most servers never see a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from minisgl.core import Grammar, TokenConstraint
from minisgl.text import Tokenizer

MAX_GRAMMAR_CHARS = 200_000
_MAX_VISITS = 50_000
_UNSUPPORTED = ("not", "if", "contains", "dependentSchemas")  # xgrammar would silently ignore these


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError("structured output needs xgrammar: pip install 'minisgl[server]'") from error
    return xgrammar


def check_grammar(grammar: Grammar) -> None:
    """Raise ValueError, saying what is wrong, for a grammar that cannot be compiled or never comes to an
    end.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar has {len(grammar.text)} characters; {MAX_GRAMMAR_CHARS} is the limit")
    if grammar.kind == "json_object":
        return
    if grammar.kind == "json_schema":
        _check_schema(grammar.text)
    xgrammar = _xgrammar()
    parse = {
        "json_schema": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": xgrammar.Grammar.from_ebnf,
    }[grammar.kind]
    try:
        parse(grammar.text)
    except RuntimeError as error:
        raise ValueError(f"the {grammar.kind} is not valid: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """xgrammar's own words, without the time and the source line in front of them."""
    return re.sub(r"^\[[0-9:]+\] \S+:[0-9]+: ", "", str(error)).strip()


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise ValueError("the JSON schema must be an object")
    try:
        ends = _SchemaWalk(schema).ends(schema, frozenset())
    except RecursionError as error:
        raise ValueError("the JSON schema is nested too deeply") from error
    if not ends:
        raise ValueError(
            "the JSON schema has a $ref cycle without a base case: no finite value can satisfy it"
        )


class _SchemaWalk:
    """Decides whether some finite value satisfies a schema: a value must exist that uses no $ref inside
    itself again.
    """

    def __init__(self, root: Any):
        self._root = root
        self._visits = 0

    def ends(self, schema: Any, open_refs: frozenset[str]) -> bool:
        """Whether a finite value exists, given that the refs in open_refs are being expanded already."""
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise ValueError("the JSON schema is too large")
        if not isinstance(schema, Mapping):
            return True
        unsupported = [key for key in _UNSUPPORTED if key in schema]
        if unsupported:
            raise ValueError(
                f"the JSON schema uses {unsupported[0]!r}, which cannot be enforced: leave it out"
            )
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in open_refs:
                return False
            return self.ends(self._resolve(ref), open_refs | {ref})
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, list) and options:
                ends = [
                    self.ends(option, open_refs) for option in options
                ]  # all, to find a broken $ref in any
                return any(ends)
        parts = schema.get("allOf")
        if isinstance(parts, list) and not all(self.ends(part, open_refs) for part in parts):
            return False
        return self._object_ends(schema, open_refs) and self._array_ends(schema, open_refs)

    def _object_ends(self, schema: Mapping[str, Any], open_refs: frozenset[str]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return True
        return all(self.ends(properties.get(name), open_refs) for name in required if isinstance(name, str))

    def _array_ends(self, schema: Mapping[str, Any], open_refs: frozenset[str]) -> bool:
        least = schema.get("minItems")
        if not isinstance(least, int) or least < 1:
            return True
        return self.ends(schema.get("items"), open_refs)

    def _resolve(self, ref: Any) -> Any:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise ValueError(
                f"the JSON schema has the $ref {ref!r}: only references inside it (#/…) can be followed"
            )
        node = self._root
        for part in ref.removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if part and (not isinstance(node, Mapping) or part not in node):
                raise ValueError(f"the JSON schema has the $ref {ref!r}, which leads nowhere")
            node = node[part] if part else node
        return node


class GrammarConstraint:
    """One request's place in a compiled grammar."""

    def __init__(self, matcher: Any, end_tokens: frozenset[int]):
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._dry = False  # no token at all can follow: a grammar whose rules never come to an end
        self.terminated = False

    def fill_bitmask(self, bitmask_row: Any) -> None:
        """Set the bits of the allowed tokens. Where the grammar has run dry, only the end tokens are
        allowed.
        """
        self._matcher.fill_next_token_bitmask(bitmask_row.view(1, -1))
        self._dry = not bool(bitmask_row.any())
        if self._dry:
            for token in self._end_tokens:
                _allow(bitmask_row, token)

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if the grammar does not allow it."""
        if self._dry:
            self.terminated = token_id in self._end_tokens
            return self.terminated
        accepted = bool(self._matcher.accept_token(token_id))
        self.terminated = bool(self._matcher.is_terminated())
        return accepted


class ThinkFirst:
    """A constraint that lets the model think freely before it applies; see `Grammar`."""

    def __init__(self, inner: TokenConstraint, think_start: int | None, think_end: int):
        self._inner = inner
        self._think_start, self._think_end = think_start, think_end
        self._state = "free" if think_start is None else "start"  # start, free, bound
        self.terminated = False

    def fill_bitmask(self, bitmask_row: Any) -> None:
        """Everything while thinking; the grammar's tokens afterwards; at the start also the token that begins thinking."""
        if self._state == "free":
            bitmask_row.fill_(-1)
            return
        self._inner.fill_bitmask(bitmask_row)
        if self._state == "start" and self._think_start is not None:
            _allow(bitmask_row, self._think_start)

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if neither thinking nor the grammar allows it."""
        if self._state == "free":
            self._state = "bound" if token_id == self._think_end else "free"
            return True
        if self._state == "start" and token_id == self._think_start:
            self._state = "free"
            return True
        self._state = "bound"
        accepted = self._inner.accept(token_id)
        self.terminated = self._inner.terminated
        return accepted


def _allow(bitmask_row: Any, token: int) -> None:
    word, bit = divmod(token, 32)
    bitmask_row[word] |= (1 << bit) - (1 << 32) * (bit == 31)  # bit 31 is the sign


class GrammarFactory:
    """Compiles grammars for one vocabulary; equal grammars are compiled once.

    vocab_size: rows of the model's output layer, which may be more than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Any = None

    def __call__(self, grammar: Grammar) -> TokenConstraint:
        """A fresh constraint. ValueError if the grammar does not compile."""
        xgrammar = _xgrammar()
        end_tokens = sorted(self._tokenizer.eos_token_ids)
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer.hf, vocab_size=self._vocab_size, stop_token_ids=end_tokens
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=256 << 20)
        try:
            compiled = self._compile(grammar)
        except RuntimeError as error:
            raise ValueError(f"the {grammar.kind} is not valid: {_reason(error)}") from error
        constraint = GrammarConstraint(xgrammar.GrammarMatcher(compiled), frozenset(end_tokens))
        if grammar.think_end is None:
            return constraint
        return ThinkFirst(constraint, grammar.think_start, grammar.think_end)

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind == "json_object":
            return self._compiler.compile_json_schema(
                '{"type": "object"}', any_whitespace=False, strict_mode=False
            )
        if grammar.kind == "json_schema":
            # free white space would let a weak model idle between two tokens for ever
            return self._compiler.compile_json_schema(grammar.text, any_whitespace=False)
        if grammar.kind == "regex":
            return self._compiler.compile_regex(grammar.text)
        return self._compiler.compile_grammar(grammar.text)
