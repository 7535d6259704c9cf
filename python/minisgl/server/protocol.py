"""Bodies of OpenAI's requests, as far as this engine knows them. Strict types; fields it does not know are
ignored.

`strict` and `allow_inf_nan=False` matter: otherwise "nan" given as a string would become a float that no
JSON encoder takes.
Ranges of sampling parameters are checked once, in `core.SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minisgl.server.errors import bad_request


class Body(BaseModel):
    """Base of all request bodies and their parts."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    """include_usage: one last chunk with the token counts. continuous_usage_stats: counts so far in each
    chunk.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(Body):
    """A schema with a name, as in response_format."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingBody(Body):
    """Parameters that chat and plain completions share. None is the same as absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    user: str | None = None


# Left to right and failing at the first wrong item: a prompt of a million ids must not be reported a million
# times.
_Ids = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    str | _Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[_Ids], Field(fail_fast=True)],
    Field(union_mode="left_to_right"),
]


class CompletionRequest(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class FunctionCall(Body):
    """A call in an assistant message; arguments is JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """One entry of tool_calls in an assistant message."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ContentPart(Body):
    """One part of a message; only text can be read by the models served here."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Body):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Body):
    """A function that the model may call. parameters is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One entry of tools."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function of a named tool_choice."""

    name: str


class NamedToolChoice(Body):
    """tool_choice that names one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def chat_request(fields: dict[str, Any]) -> ChatCompletionRequest:
    """A chat request from another API's body. ApiError 400 where the parts do not fit."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise bad_request(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a conversation to be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: _Ids


class AbortRequest(Body):
    """POST /abort: one request by the id of its answer, or all."""

    request_id: str | None = None
    abort_all: bool | None = None
