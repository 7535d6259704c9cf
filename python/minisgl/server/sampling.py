"""From the parameters of a request body to `SamplingParams`; every complaint is a 400 that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from minisgl.core import Grammar, SamplingParams
from minisgl.server.errors import ApiError, bad_request
from minisgl.server.protocol import SamplingBody
from minisgl.server.structured import check_grammar

_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
)
MAX_STOPS = 16
MAX_SEED = 2**63 - 1


def sampling_params(
    body: SamplingBody,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None = None,
    grammar: Grammar | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The parameters of a request. max_tokens: already bounded by the context. ApiError 400 for anything out
    of range.
    """
    values = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop holds {len(stops)} strings; use at most {MAX_STOPS}", "stop")
    if body.seed is not None and body.seed > MAX_SEED:
        raise bad_request(f"seed={body.seed} is too large: use at most {MAX_SEED}", "seed")
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(stops),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=logit_bias(body.logit_bias or {}),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            **values,
        )
        params.check_vocabulary(vocab_size)
    except ValueError as error:
        raise bad_request(str(error), _field_of(str(error))) from error
    return params


def _field_of(message: str) -> str | None:
    """The first word of a complaint that is a field's name."""
    words = re.findall(r"[a-z_]+", message)
    return next((word for word in words if word in SamplingBody.model_fields), None)


def logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are text; token ids are numbers."""
    wrong = [key for key in biases if not re.fullmatch(r"[0-9]{1,9}", key)]
    if wrong:
        raise bad_request(f"logit_bias has the key {wrong[0]!r}: use token ids", "logit_bias")
    return {int(key): value for key, value in biases.items()}


def asks_for_grammar(body: SamplingBody) -> bool:
    """Whether `grammar_of` has anything to do; it compiles, so it is called off the event loop."""
    form = body.response_format
    structured = form is not None and form.type != "text"
    return structured or any(
        x is not None for x in (body.guided_json, body.guided_regex, body.guided_grammar)
    )


def grammar_of(body: SamplingBody) -> Grammar | None:
    """The grammar that the body asks for, already known to be well formed. At most one way of asking is
    allowed.
    """
    wanted: list[tuple[str, Grammar]] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        wanted.append(("response_format", Grammar("json_object")))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise bad_request(
                "response_format of type json_schema needs json_schema.schema", "response_format"
            )
        wanted.append(("response_format", Grammar("json_schema", json.dumps(form.json_schema.schema_))))
    if body.guided_json is not None:
        text = body.guided_json if isinstance(body.guided_json, str) else json.dumps(body.guided_json)
        wanted.append(("guided_json", Grammar("json_schema", text)))
    if body.guided_regex is not None:
        wanted.append(("guided_regex", Grammar("regex", body.guided_regex)))
    if body.guided_grammar is not None:
        wanted.append(("guided_grammar", Grammar("ebnf", body.guided_grammar)))
    if len(wanted) > 1:
        raise bad_request(f"{wanted[0][0]} and {wanted[1][0]} exclude each other: give one", wanted[1][0])
    if not wanted:
        return None
    field, grammar = wanted[0]
    try:
        check_grammar(grammar)
    except ValueError as error:
        raise bad_request(str(error), field) from error
    return grammar


def max_new_tokens(asked: int | None, num_prompt: int, max_model_len: int, least: int = 1) -> int:
    """Tokens that may be generated: what was asked, at most what the context leaves. ApiError 400 below `least`."""
    if asked is not None and asked < least:
        raise bad_request(f"max_tokens={asked} must be at least {least}", "max_tokens")
    room = max_model_len - num_prompt
    if asked is None or asked <= room:
        return room if asked is None else asked
    message = (
        f"This model's maximum context length is {max_model_len} tokens; the prompt has {num_prompt} and max_tokens asks "
        f"for {asked} more. Use max_tokens of at most {room}."
    )
    raise ApiError(400, message, "max_tokens", "context_length_exceeded")
