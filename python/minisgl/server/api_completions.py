"""POST /v1/completions: plain text continuation, of one or several prompts given as text or as token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import TokenLogprobs
from minisgl.server.answers import DONE, EventStream, JsonAnswer, data_frame, held
from minisgl.server.errors import bad_request
from minisgl.server.generation import Choice, Delta, Generation
from minisgl.server.parsers import Text
from minisgl.server.protocol import CompletionRequest, StreamOptions
from minisgl.server.routes import APIRouter, Request, Response, StrictRoute, service_of
from minisgl.server.sampling import asks_for_grammar, grammar_of, max_new_tokens, sampling_params
from minisgl.server.service import Job, Service, new_id
from minisgl.text import Tokenizer

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])
LOWEST = -9999.0  # what stands for a log-probability of minus infinity, which JSON does not know


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, whole or as a stream of chunks."""
    service = service_of(request)
    request_id = new_id("cmpl")
    job = await prepare_completion(service, body, request_id)
    echoes = [_prompt_text(service, body, ids) for ids in job.prompts] if body.echo else None
    generation = service.start(job)
    answer = CompletionAnswer(service, generation, request_id, echoes, body.logprobs is not None)
    if body.stream:
        return EventStream(generation.ticket, answer.frames(body.stream_options or StreamOptions()))
    async with held(request.receive, generation.ticket):
        return JsonAnswer(await answer.whole())


def _prompt_text(service: Service, body: CompletionRequest, ids: Sequence[int]) -> str:
    if isinstance(body.prompt, str):
        return body.prompt
    return service.pool.tokenizer.decode(ids)


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts, as a list of texts or of token lists."""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is empty: give a text, token ids, or a list of them", "prompt")
    return prompt


async def prepare_completion(service: Service, body: CompletionRequest, request_id: str) -> Job:
    """Check and tokenize. ApiError for whatever is wrong with the body."""
    arrival = time.perf_counter()
    prompts = _prompts(body)
    service.check_count("the number of prompts", len(prompts))
    count = service.check_count("n", body.n)
    service.admit(body.model, len(prompts) * count)
    if body.suffix:
        raise bad_request("suffix is not supported: put the text after the gap into the prompt", "suffix")
    if body.best_of is not None and body.best_of != count:
        raise bad_request("best_of is not supported: use n and choose yourself", "best_of")
    facts, pool = service.client.facts, service.pool
    grammar = await pool.run(grammar_of, body) if asks_for_grammar(body) else None
    ids: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(await pool.encode(prompt, facts.max_model_len))
        else:
            ids.append(pool.check_ids(prompt, facts.max_model_len, facts.vocab_size))
    params = []
    for prompt_ids in ids:
        room = facts.max_model_len - len(prompt_ids)
        asked = room if body.max_tokens is None else body.max_tokens
        limit = max_new_tokens(asked, len(prompt_ids), facts.max_model_len, least=0 if body.echo else 1)
        of_prompt = body.logprobs if body.echo else None
        params.append(sampling_params(body, facts.vocab_size, limit, body.logprobs, grammar, of_prompt))
    return Job(request_id, ids, params, count, priority=body.priority or 0, arrival=arrival)


class LogprobLists:
    """The `logprobs` object of one answer, a part of it at a time. text_offset is where a token's text begins."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], echoes: bool):
        """echoes: whether the answer's text begins with the prompt."""
        self._tokenizer, self._first = tokenizer, prompt_ids[0]
        self._detokenizer = tokenizer.detokenizer(at_start=echoes)
        self._offset = 0

    def take(
        self, logprobs: Sequence[TokenLogprobs], of_prompt: Sequence[TokenLogprobs] | None = None
    ) -> dict[str, list[Any]]:
        """The lists for the next tokens. of_prompt: those of the prompt's tokens but the first, which follows nothing."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if of_prompt is not None:
            self._add(lists, self._first, None, None)
        for item in (*(of_prompt or ()), *logprobs):
            top: dict[str, float] = {}
            for token, value in (*item.top, (item.token_id, item.logprob)):
                top.setdefault(
                    self._text(token), max(value, LOWEST)
                )  # several tokens may look alike: the best one's
            self._add(lists, item.token_id, max(item.logprob, LOWEST), top)
        return lists

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)[0]

    def _add(
        self, lists: dict[str, list[Any]], token_id: int, value: float | None, top: dict[str, float] | None
    ) -> None:
        entry = zip(lists.values(), (self._text(token_id), value, top, self._offset))
        for items, item in entry:
            items.append(item)
        self._offset += len(self._detokenizer.feed(token_id))


@dataclass
class _Answer:
    """One choice on its way out. echo: what its text begins with, until that is said. lists: None without logprobs."""

    choice: Choice
    echo: str
    lists: LogprobLists | None

    def fields(self, delta: Delta) -> dict[str, Any]:
        """The choice's object for what is new."""
        text = "".join(event.text for event in delta.events if isinstance(event, Text))
        text, self.echo = self.echo + text, ""
        logprobs = None if self.lists is None else self.lists.take(delta.logprobs, delta.prompt_logprobs)
        fields = {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            fields["stop_reason"] = self.choice.stop_reason
        return fields


class CompletionAnswer:
    """A generation in OpenAI's text completion format. echoes: prompts to repeat in front of the answers."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        request_id: str,
        echoes: Sequence[str] | None,
        with_logprobs: bool,
    ):
        self._generation = generation
        self._answers: list[_Answer] = []
        per_prompt = len(generation.choices) // len(echoes) if echoes else 1
        for index, choice in enumerate(generation.choices):
            lists = None
            if with_logprobs:
                lists = LogprobLists(service.pool.tokenizer, choice.request.prompt_ids, echoes is not None)
            self._answers.append(_Answer(choice, echoes[index // per_prompt] if echoes else "", lists))
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    async def whole(self) -> dict[str, Any]:
        """The text_completion object."""
        sums = [Delta(index) for index in range(len(self._answers))]
        async for deltas in self._generation.deltas():
            for delta in deltas:
                sums[delta.index].add(delta)
        choices = [answer.fields(delta) for answer, delta in zip(self._answers, sums)]
        return self._head | {"choices": choices, "usage": self._generation.usage()}

    async def frames(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Chunks as server-sent events, the usage if asked for, and [DONE]."""
        chunk: dict[str, Any] = dict(self._head)
        if options.include_usage:
            chunk["usage"] = None
        async for deltas in self._generation.deltas():
            if options.continuous_usage_stats:
                chunk["usage"] = self._generation.usage()
            frames = [
                data_frame(chunk | {"choices": [self._answers[delta.index].fields(delta)]})
                for delta in deltas
            ]
            yield b"".join(frames)
        if options.include_usage:
            yield data_frame(chunk | {"choices": [], "usage": self._generation.usage()}) + DONE
        else:
            yield DONE
