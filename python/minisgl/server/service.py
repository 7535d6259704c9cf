"""What all endpoints share: the engine, the tokenizer, the metrics, and how a checked request body becomes a
generation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minisgl.core import Request, SamplingParams
from minisgl.server.config import ServerConfig
from minisgl.server.engine_client import EngineClient
from minisgl.server.errors import ApiError, bad_request
from minisgl.server.generation import Choice, Generation
from minisgl.server.metrics import Metrics
from minisgl.server.parsers import Formats, OutputParser, PlainParser, detect
from minisgl.server.tokenizer import TokenizerPool


@dataclass(frozen=True)
class Job:
    """A request body, checked and tokenized: what has to be generated.

    params: one for each prompt. num_choices: answers to each prompt. at_start: the answers are texts of
    their own rather than continuations of their prompts. arrival: time.perf_counter() of the HTTP request.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    num_choices: int = 1
    make_parser: Callable[[], OutputParser] = PlainParser
    at_start: bool = False
    priority: int = 0
    arrival: float = 0.0


class Service:
    """One served model."""

    def __init__(self, config: ServerConfig, model_name: str, client: EngineClient, pool: TokenizerPool):
        self.config = config
        self.model_name = config.served_model_name or model_name
        self.client = client
        self.pool = pool
        self.metrics = Metrics(self.model_name)
        self.created = int(time.time())
        self.formats: Formats = detect(config.tool_parser, config.reasoning_parser, pool.template_text)

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.client.facts.max_model_len

    def admit(self, model: str | None, num_requests: int) -> None:
        """Turn away, before any work on the prompt, what the server cannot take now or does not serve at
        all.
        """
        if model and model != self.model_name:
            message = f"The model {model!r} does not exist; this server has {self.model_name!r}."
            raise ApiError(404, message, "model", "model_not_found")
        self.client.check_open(num_requests)

    def check_count(self, name: str, count: int | None) -> int:
        """n, or a number of prompts. ApiError 400 if there are more than the server is set to take."""
        count = 1 if count is None else count
        if not 1 <= count <= self.config.max_choices:
            raise bad_request(f"{name}={count} is not allowed: use 1 to {self.config.max_choices}", name)
        return count

    def start(self, job: Job) -> Generation:
        """Hand a job to the engine. Answer i * num_choices + j is the j-th to prompt i. ApiError 503 when it
        is full.
        """
        choices: list[Choice] = []
        for prompt, params in zip(job.prompts, job.params, strict=True):
            for number in range(job.num_choices):
                choices.append(self._choice(job, len(choices), tuple(prompt), _reseeded(params, number)))
        ticket = self.client.submit([choice.request for choice in choices])
        ticket.expire_after(self.config.request_timeout)
        return Generation(ticket, choices, sum(map(len, job.prompts)), self.metrics, job.arrival)

    def _choice(self, job: Job, index: int, prompt: tuple[int, ...], params: SamplingParams) -> Choice:
        tokenizer = self.pool.tokenizer
        request = Request(f"{job.request_id}-{index}", prompt, params, tokenizer.eos_token_ids, job.priority)
        parser = job.make_parser()
        ids = (tokenizer.token_id(marker) for marker in parser.markers)
        keep = frozenset(i for i in ids if i is not None)
        return Choice(index, request, tokenizer.detokenizer(keep, job.at_start), parser)


def _reseeded(params: SamplingParams, number: int) -> SamplingParams:
    """Equal seeds would make n equal answers."""
    return params if params.seed is None or number == 0 else replace(params, seed=params.seed + number)


def new_id(prefix: str) -> str:
    """A fresh id of an answer. No "-" after the prefix: what follows one is the number of a choice."""
    return f"{prefix}-{uuid.uuid4().hex}"
