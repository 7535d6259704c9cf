"""A scheduler without a model: it says the prompt back, at a set rate, with every number made up by rule.

It stands in for the real one where the server itself is under test or under measurement, and because its
answer is known beforehand, a test can make a "model" say anything: reasoning, tool calls, broken JSON.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minisgl.core import FinishReason, Grammar, Request, StepOutput, TokenConstraint, TokenLogprobs
from minisgl.server.engine_process import EngineParts
from minisgl.server.ipc import EngineFacts, ExpertMap
from minisgl.server.structured import GrammarFactory
from minisgl.text import Tokenizer

PAGE_SIZE = 16  # tokens
_LAYERS, _EXPERTS = 8, 32  # of the expert map shown by the live view
_RECORD_BYTES = 1000  # of an expert


@dataclass(frozen=True)
class NullOptions:
    """How the stand-in behaves.

    step_seconds: time from one step to the next. load_file: it is ready once this file exists. separator: token
    id in the prompt after which nothing is said back. eos_token_id: ends each answer. fail_token: a prompt with
    this token makes the step raise, which is how engine death is tested. preferred: tokens tried first under a
    grammar, so that strings and lists get closed. stamp: each output says when it was made, in microseconds of
    the monotonic clock, in the place of num_cached_tokens; that is how the way to the client is timed.
    """

    max_model_len: int = 4096
    vocab_size: int = 512
    num_pages: int = 16384
    max_running: int = 256
    step_seconds: float = 0.0
    load_file: str | None = None
    separator: int | None = None
    eos_token_id: int | None = None
    fail_token: int | None = None
    preferred: tuple[int, ...] = ()
    stamp: bool = False


@dataclass
class NullStats:
    """The same names as the real scheduler's."""

    num_running: int
    num_waiting: int
    pages_free: int
    pages_evictable: int
    pages_protected: int
    pages_total: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass
class _Running:
    request: Request
    reply: Sequence[int]
    pages: int
    constraint: TokenConstraint | None
    tokens: list[int] = field(default_factory=list)


class NullScheduler:
    """Echoes each prompt, then repeats it from its start until the request's end."""

    def __init__(
        self, options: NullOptions, constraint_factory: Callable[[Grammar], TokenConstraint] | None = None
    ):
        self.options = options
        self._constraint_factory = constraint_factory
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._ended: list[StepOutput] = []
        self._free_pages = options.num_pages
        self._generated = self._prompt_tokens = 0
        self._next_step = 0.0

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits, or was ended since the last step."""
        return bool(self._running or self._waiting or self._ended)

    def add(self, request: Request) -> None:
        """Queue a request. ValueError if the context or the pages can never hold it."""
        length = len(request.prompt_ids)
        if length >= self.options.max_model_len:
            raise ValueError(
                f"prompt of {length} tokens, context of {self.options.max_model_len}: shorten it"
            )
        grammar = request.params.grammar
        constraint = None
        if grammar is not None:
            if self._constraint_factory is None:
                raise ValueError("this engine was started without structured output")
            constraint = self._constraint_factory(grammar)
        pages = -(-self._longest(request) // PAGE_SIZE)
        if pages > self.options.num_pages:
            raise ValueError(f"the request needs {pages} pages of {self.options.num_pages}: lower max_tokens")
        ids = list(request.prompt_ids)
        if self.options.separator in ids:
            ids = ids[: ids.index(self.options.separator)]
        self._waiting.append(_Running(request, ids or [0], pages, constraint))

    def abort(self, request_id: str) -> None:
        """End a running or waiting request."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self._free_pages += running.pages
        waiting = [w for w in self._waiting if w.request.request_id == request_id]
        for entry in waiting:
            self._waiting.remove(entry)
        if running is not None or waiting:
            self._ended.append(StepOutput(request_id, None, finish_reason=FinishReason.ABORT))

    def step(self) -> list[StepOutput]:
        """One token for each running request."""
        self._pace()
        self._admit()
        outputs, self._ended = self._ended, []
        for entry in list(self._running.values()):
            if self.options.fail_token in entry.request.prompt_ids:
                raise RuntimeError("made to fail by a token of the prompt")
            outputs.append(self._advance(entry))
        return outputs

    def stats(self) -> NullStats:
        """Counters."""
        return NullStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            pages_free=self._free_pages,
            pages_evictable=0,
            pages_protected=self.options.num_pages - self._free_pages,
            pages_total=self.options.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            generated_tokens=self._generated,
        )

    def numbers(self) -> dict[str, float]:
        """An expert cache that finds six experts of eight for every token."""
        tokens = self._generated
        hits, misses = 6.0 * tokens, 2.0 * tokens
        return {"expert_hits": hits, "expert_misses": misses, "link_bytes": misses * _RECORD_BYTES}

    def experts(self) -> ExpertMap:
        """A map that moves with the tokens."""
        cells = range(_LAYERS * _EXPERTS)
        heat = bytes((i * 37 + self._generated * (1 + i % 5)) % 256 for i in cells)
        resident = bytes(int((i + self._generated // 64) % 4 == 0) for i in cells)
        return ExpertMap(_LAYERS, _EXPERTS, heat, resident)

    def _longest(self, request: Request) -> int:
        room = self.options.max_model_len - len(request.prompt_ids)
        asked = request.params.max_tokens
        return len(request.prompt_ids) + (room if asked is None else min(asked, room))

    def _pace(self) -> None:
        now = time.perf_counter()
        if self._next_step > now:
            time.sleep(self._next_step - now)
        self._next_step = max(now, self._next_step) + self.options.step_seconds

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.options.max_running:
            entry = self._waiting[0]
            if entry.pages > self._free_pages:
                return
            self._waiting.popleft()
            self._free_pages -= entry.pages
            self._prompt_tokens += len(entry.request.prompt_ids)
            self._running[entry.request.request_id] = entry

    def _advance(self, entry: _Running) -> StepOutput:
        request, params = entry.request, entry.request.params
        of_prompt = None
        if params.prompt_logprobs is not None and not entry.tokens:
            of_prompt = tuple(self._logprobs(t, params.prompt_logprobs) for t in request.prompt_ids[1:])
        if params.max_tokens == 0:
            self._leave(entry)
            length = FinishReason.LENGTH
            return StepOutput(request.request_id, None, finish_reason=length, prompt_logprobs=of_prompt)
        token = self._choose(entry)
        entry.tokens.append(token)
        self._generated += 1
        reason = None
        count = len(entry.tokens)
        is_end = token in params.stop_token_ids or (token in request.eos_token_ids and not params.ignore_eos)
        if (is_end and count >= params.min_tokens) or (entry.constraint and entry.constraint.terminated):
            reason = FinishReason.STOP
        elif len(request.prompt_ids) + count >= self._longest(request):
            reason = FinishReason.LENGTH
        if reason is not None:
            self._leave(entry)
        logprobs = None if params.logprobs is None else self._logprobs(token, params.logprobs)
        stamp = time.monotonic_ns() // 1000 if self.options.stamp else 0
        return StepOutput(
            request.request_id, token, logprobs, reason, num_cached_tokens=stamp, prompt_logprobs=of_prompt
        )

    def _leave(self, entry: _Running) -> None:
        del self._running[entry.request.request_id]
        self._free_pages += entry.pages

    def _choose(self, entry: _Running) -> int:
        at = len(entry.tokens)
        eos = self.options.eos_token_id
        if eos is not None and at == len(entry.reply):
            token = eos
        else:
            token = entry.reply[at % len(entry.reply)]
        return token if entry.constraint is None else self._constrained(entry.constraint, token)

    def _constrained(self, constraint: TokenConstraint, wish: int) -> int:
        import torch  # only here, so that a server without grammars starts without it

        words = torch.zeros(-(-self.options.vocab_size // 32), dtype=torch.int32)
        constraint.fill_bitmask(words)
        bits = [int(w) & 0xFFFFFFFF for w in words]
        if all(word == 0xFFFFFFFF for word in bits):
            assert constraint.accept(wish)
            return wish
        candidates = (*self.options.preferred, wish, *range(self.options.vocab_size))
        token = next(t for t in candidates if bits[t // 32] >> (t % 32) & 1)
        assert constraint.accept(token)
        return token

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        ranked = [((token + i) % self.options.vocab_size, -0.1 - i) for i in range(num_top)]
        return TokenLogprobs(token, -0.1, tuple(ranked))


@dataclass(frozen=True)
class NullEngine:
    """A picklable factory of the stand-in. tokenizer_path: folder of `write_tokenizer`, for structured
    output.
    """

    options: NullOptions = NullOptions()
    tokenizer_path: str | None = None

    def __call__(self) -> EngineParts:
        """Build it, once it may."""
        while self.options.load_file is not None and not os.path.exists(self.options.load_file):
            time.sleep(0.01)
        facts = EngineFacts(self.options.max_model_len, self.options.vocab_size, _LAYERS, _EXPERTS)
        scheduler = NullScheduler(self.options, self._constraint if self.tokenizer_path else None)
        return EngineParts(scheduler, facts, scheduler.experts, scheduler.numbers)

    def _constraint(self, grammar: Grammar) -> TokenConstraint:
        assert self.tokenizer_path is not None
        factory = GrammarFactory(Tokenizer.load(self.tokenizer_path), self.options.vocab_size)
        return factory(grammar)


SPECIAL_TOKENS = ("<|end|>", "<|sep|>", "<|assistant|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# The answer is the last message; after <|sep|> stands what must not be said back.
CHAT_TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('the system message must come first') }}
{%- endif -%}
{%- endfor -%}
{{- messages[-1].content -}}<|sep|>
{%- for m in messages[:-1] -%}
{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}
{% endfor -%}
{{- tools | tojson if tools else '' -}}{{ reasoning_effort if reasoning_effort else '' }}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking -%}<think>

</think>

{% elif open_thinking -%}<think>
{% endif -%}"""


def write_tokenizer(folder: str) -> NullOptions:
    """Write a tokenizer with one token a byte, and a chat template; returns the options that fit it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKER_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL_TOKENS[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    vocab = backend.get_vocab()
    return NullOptions(
        vocab_size=len(tokenizer),
        separator=vocab["<|sep|>"],
        eos_token_id=vocab["<|end|>"],
        preferred=(vocab["<|end|>"], *(vocab[char] for char in '"}]0,:')),
    )
