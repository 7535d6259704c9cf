"""The web application: routers, errors in OpenAI's words, and what wraps every request."""

from __future__ import annotations

import logging
from typing import Any

from minisgl.server import api_anthropic, api_chat, api_completions, api_live, api_models, api_responses
from minisgl.server.answers import JsonAnswer
from minisgl.server.errors import ApiError
from minisgl.server.gate import Gate
from minisgl.server.routes import Request, Response
from minisgl.server.service import Service

try:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise ImportError("the server needs more packages: pip install 'minisgl[server]'") from error

logger = logging.getLogger(__name__)
_MAX_SHOWN = 3  # complaints about one body


def create_app(service: Service) -> FastAPI:
    """An application for one service."""
    app = FastAPI(title="minisgl", version=api_models.version(), docs_url=None, redoc_url=None)
    app.state.service = service
    for module in (api_chat, api_completions, api_responses, api_anthropic, api_models, api_live):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)
    config = service.config
    app.add_middleware(Gate, api_key=config.api_key, max_body_bytes=config.max_body_bytes)
    if config.cors_origins:
        origins = list(config.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _answer(request: Request, error: ApiError) -> Response:
    request.app.state.service.metrics.error(error.status)
    return JsonAnswer(error.body(), status_code=error.status, headers=error.headers)


async def _on_api_error(request: Request, error: Any) -> Response:
    return _answer(request, error)


async def _on_validation_error(request: Request, error: Any) -> Response:
    """Pydantic's complaints as one 400. The values are left out: they may be huge, or no JSON at all."""
    complaints, param = [], None
    for item in error.errors()[:_MAX_SHOWN]:
        place = [str(part) for part in item["loc"] if part != "body"]
        param = param or (place[0] if place and item["type"] != "json_invalid" else None)
        detail = item.get("ctx", {}).get("error", "") if item["type"] == "json_invalid" else ""
        complaints.append(f"{'.'.join(place) or 'body'}: {item['msg']} {detail}".strip())
    return _answer(request, ApiError(400, "; ".join(complaints), param, "invalid_value"))


async def _on_http_error(request: Request, error: Any) -> Response:
    answer = _answer(
        request, ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
    )
    answer.headers.update(error.headers or {})
    return answer


async def _on_unexpected(request: Request, error: Any) -> Response:
    logger.error("a request failed", exc_info=error)
    return _answer(
        request, ApiError(500, "The server failed on this request; its log says why.", code="internal")
    )
