"""Models, tokenizing, and the endpoints for whoever runs the server: health, readiness, metrics, version,
abort.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from minisgl.server.answers import JsonAnswer
from minisgl.server.chat import render_prompt
from minisgl.server.errors import ApiError, bad_request
from minisgl.server.metrics import CONTENT_TYPE
from minisgl.server.protocol import AbortRequest, ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from minisgl.server.routes import APIRouter, Request, Response, StrictRoute, service_of
from minisgl.server.service import Service

router = APIRouter(route_class=StrictRoute)


def version() -> str:
    """The installed version; "source" when the package is run from a checkout that was not installed."""
    try:
        return importlib.metadata.version("minisgl")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "minisgl",
        "max_model_len": service.max_model_len,
    }


@router.get("/v1/models", response_model=None, tags=["OpenAI"])
async def models(request: Request) -> Response:
    """The one model served."""
    return JsonAnswer({"object": "list", "data": [_model_card(service_of(request))]})


@router.get("/v1/models/{model_id:path}", response_model=None, tags=["OpenAI"])
async def model(model_id: str, request: Request) -> Response:
    """The model by name; 404 for any other."""
    service = service_of(request)
    if model_id != service.model_name:
        raise ApiError(404, f"The model {model_id!r} does not exist.", "model", "model_not_found")
    return JsonAnswer(_model_card(service))


@router.post("/tokenize", response_model=None, tags=["text"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as it would be rendered."""
    service = service_of(request)
    pool = service.pool
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is not None:
        chat = ChatCompletionRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        text, special = await render_prompt(service, chat, []), bool(body.add_special_tokens)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    ids = await pool.run(pool.tokenizer.encode, text, special)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [pool.tokenizer.token_text(i)[0] for i in ids]
    return JsonAnswer(answer)


@router.post("/detokenize", response_model=None, tags=["text"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    pool = service_of(request).pool
    size = pool.tokenizer.vocab_size
    wrong = [token for token in body.tokens if not 0 <= token < size]
    if wrong:
        raise bad_request(f"tokens has {wrong[0]}, but the vocabulary has {size} tokens", "tokens")
    text = await pool.run(pool.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JsonAnswer({"prompt": text})


@router.get("/tokenizer_info", response_model=None, tags=["text"])
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to know to count tokens and render conversations by itself; evaluation harnesses ask for it."""
    pool = service_of(request).pool
    hf = pool.tokenizer.hf
    names = {"bos_token": hf.bos_token, "eos_token": hf.eos_token, "pad_token": hf.pad_token}
    about = {"tokenizer_class": type(hf).__name__, "chat_template": pool.template_text or None}
    return JsonAnswer(about | names)


@router.get("/health", response_model=None, tags=["operation"])
async def health(request: Request) -> Response:
    """200 while the server lives; 503 once the engine has died."""
    dead = service_of(request).client.state == "dead"
    return JsonAnswer({"status": "dead" if dead else "alive"}, status_code=503 if dead else 200)


@router.get("/ready", response_model=None, tags=["operation"])
async def ready(request: Request) -> Response:
    """200 when requests are taken; 503 while the model loads, while draining, and after a failure."""
    state = service_of(request).client.state
    return JsonAnswer({"status": state}, status_code=200 if state == "ready" else 503)


@router.get("/metrics", response_model=None, tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    service = service_of(request)
    service.metrics.update(service.client.beat)
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/version", response_model=None, tags=["operation"])
async def get_version(request: Request) -> Response:
    """The version of minisgl."""
    return JsonAnswer({"version": version()})


@router.post("/abort", response_model=None, tags=["operation"])
async def abort(body: AbortRequest, request: Request) -> Response:
    """End one request by the id of its answer, or all; their clients get what there is, with finish reason
    "abort".
    """
    if not body.request_id and not body.abort_all:
        raise bad_request("give request_id, or abort_all: true", "request_id")
    number = service_of(request).client.abort(None if body.abort_all else body.request_id)
    return JsonAnswer({"aborted": number})
