"""POST /v1/completions: plain text continuation, of one or several prompts given as text or as token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import TokenLogprobs
from minisgl.server.answers import DONE, EventStream, JsonAnswer, data_frame, held
from minisgl.server.errors import bad_request
from minisgl.server.generation import Delta, Generation
from minisgl.server.parsers import Text
from minisgl.server.protocol import CompletionRequest, StreamOptions
from minisgl.server.routes import APIRouter, Request, Response, StrictRoute, service_of
from minisgl.server.sampling import asks_for_grammar, grammar_of, max_new_tokens, sampling_params
from minisgl.server.service import Job, Service, new_id
from minisgl.text import Tokenizer

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, whole or as a stream of chunks."""
    service = service_of(request)
    request_id = new_id("cmpl")
    job = await prepare_completion(service, body, request_id)
    echoes = [_prompt_text(service, body, ids) for ids in job.prompts] if body.echo else None
    generation = service.start(job)
    answer = CompletionAnswer(service, generation, request_id, echoes)
    answer.with_logprobs = body.logprobs is not None
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
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "echo with logprobs is not supported: prompts have no log-probabilities here", "echo"
        )
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
        asked = body.max_tokens if body.max_tokens is not None else min(DEFAULT_MAX_TOKENS, room)
        limit = max_new_tokens(asked, len(prompt_ids), facts.max_model_len)
        params.append(sampling_params(body, facts.vocab_size, limit, body.logprobs, grammar))
    return Job(request_id, ids, params, count, priority=body.priority or 0, arrival=arrival)


def _text_of(delta: Delta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, Text))


@dataclass
class _Text:
    """One answer so far. offset: where the next token begins in the text, for logprobs."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    offset: int = 0


class CompletionAnswer:
    """A generation in OpenAI's text completion format. echoes: prompts to repeat in front of the answers."""

    def __init__(
        self, service: Service, generation: Generation, request_id: str, echoes: Sequence[str] | None
    ):
        self._tokenizer = service.pool.tokenizer
        self._generation = generation
        self.with_logprobs = False
        per_prompt = len(generation.choices) // len(echoes) if echoes else 1
        self._echoes = [echoes[i // per_prompt] if echoes else "" for i in range(len(generation.choices))]
        created = int(time.time())
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": created,
            "model": service.model_name,
        }

    def _choice(self, index: int, text: str, answer: _Text) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            logprobs, answer.offset = logprob_lists(self._tokenizer, answer.logprobs, answer.offset)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        if answer.finish_reason is not None:
            choice["stop_reason"] = self._generation.choices[index].stop_reason
        return choice

    async def whole(self) -> dict[str, Any]:
        """The text_completion object."""
        answers = [_Text(echo) for echo in self._echoes]
        async for deltas in self._generation.deltas():
            for delta in deltas:
                answer = answers[delta.index]
                answer.text += _text_of(delta)
                answer.logprobs += delta.logprobs
                answer.finish_reason = delta.finish_reason or answer.finish_reason
        choices = [self._choice(index, answer.text, answer) for index, answer in enumerate(answers)]
        return self._head | {"choices": choices, "usage": self._generation.usage()}

    async def frames(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Chunks as server-sent events, the usage if asked for, and [DONE]."""
        chunk: dict[str, Any] = dict(self._head)
        if options.include_usage:
            chunk["usage"] = None
        answers = [_Text() for _ in self._echoes]
        echoes = list(self._echoes)
        async for deltas in self._generation.deltas():
            if options.continuous_usage_stats:
                chunk["usage"] = self._generation.usage()
            frames = []
            for delta in deltas:
                answer = answers[delta.index]
                answer.logprobs, answer.finish_reason = delta.logprobs, delta.finish_reason
                text, echoes[delta.index] = echoes[delta.index] + _text_of(delta), ""
                frames.append(data_frame(chunk | {"choices": [self._choice(delta.index, text, answer)]}))
            yield b"".join(frames)
        if options.include_usage:
            yield data_frame(chunk | {"choices": [], "usage": self._generation.usage()}) + DONE
        else:
            yield DONE


def logprob_lists(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], offset: int
) -> tuple[dict[str, Any], int]:
    """The `logprobs` object of a text completion, and where the next token will begin in the text."""
    tokens, values, tops, offsets = [], [], [], []
    for item in logprobs:
        text, _ = tokenizer.token_text(item.token_id)
        tokens.append(text)
        values.append(max(item.logprob, -9999.0))
        tops.append({tokenizer.token_text(token)[0]: max(value, -9999.0) for token, value in item.top})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset
