"""Text work off the event loop: rendering conversations and tokenizing in a few threads.

The Rust tokenizer releases the interpreter lock, so a prompt of megabytes does not stop the server from
answering /health; a prompt that cannot fit the context whatever its tokens are is turned away before any of
that work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from minisgl.server.errors import bad_request, context_length_exceeded
from minisgl.text import Tokenizer

P = ParamSpec("P")
R = TypeVar("R")
_SHORT = 2048  # characters: up to here a thread costs more than the work it takes over


class TokenizerPool:
    """A tokenizer and the threads it is used from. chat_template: a Jinja text that replaces the tokenizer's
    own.
    """

    def __init__(self, tokenizer: Tokenizer, num_threads: int, chat_template: str | None = None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @property
    def template_text(self) -> str:
        """The chat template in use, "" if there is none: tells which parsers fit the model."""
        own = self.tokenizer.hf.chat_template
        if isinstance(own, dict):
            own = "\n".join(own.values())
        return self.chat_template or own or ""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function in one of the threads; its ValueError becomes a 400."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))
        except ValueError as error:
            raise bad_request(str(error)) from error

    async def encode(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. ApiError 400 if they fill the context or if there are none."""
        fewest = -(-len(text) // self.tokenizer.max_token_chars)
        if fewest >= max_model_len:
            raise context_length_exceeded(fewest, max_model_len, at_least=True)
        if len(text) <= _SHORT:
            ids = self.tokenizer.encode(text, add_special_tokens)
        else:
            ids = await self.run(self.tokenizer.encode, text, add_special_tokens)
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        return self.check_ids(ids, max_model_len)

    def check_ids(self, ids: list[int], max_model_len: int, vocab_size: int | None = None) -> list[int]:
        """The ids themselves, once it is certain that the engine can take them. vocab_size: check the range,
        too.
        """
        if not ids:
            raise bad_request("The prompt is empty: give at least one token.", "prompt")
        if len(ids) >= max_model_len:
            raise context_length_exceeded(len(ids), max_model_len)
        if vocab_size is not None and not all(0 <= i < vocab_size for i in ids):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise bad_request(
                f"The prompt has token {wrong}, but the vocabulary has {vocab_size} tokens.", "prompt"
            )
        return ids

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        options: dict[str, Any],
    ) -> str:
        """The prompt text of a conversation; see `Tokenizer.render_chat`."""
        render, template = self.tokenizer.render_chat, self.chat_template
        return await self.run(render, messages, tools, add_generation_prompt, template, options)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
