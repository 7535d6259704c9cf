"""What every request passes before it reaches an endpoint: the key, and the size of the body.

Plain ASGI. Starlette's BaseHTTPMiddleware would put a task between endpoint and client, behind which a
disconnect goes unseen.
"""

from __future__ import annotations

import hmac
import uuid
from typing import Any

from minisgl.server.answers import JsonAnswer
from minisgl.server.errors import ApiError

# Nothing here tells or changes anything about requests; probes and scrapers seldom have keys.
_OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/version", "/favicon.ico")
_OPEN_FOLDER = "/web/"


class Gate:
    """ASGI middleware. api_key: None lets everybody in. max_body_bytes: larger bodies are answered 413."""

    def __init__(self, app: Any, api_key: str | None, max_body_bytes: int):
        self._app = app
        self._api_key = api_key
        self._max_body = max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or answer it with 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = (headers.get(b"x-request-id") or uuid.uuid4().hex.encode())[:128]

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        error = self._refusal(scope, headers)
        if error is not None:
            answer = JsonAnswer(error.body(), status_code=error.status)
            await answer(scope, receive, send_with_id)
            return
        await self._app(scope, self._limited(receive), send_with_id)

    def _refusal(self, scope: Any, headers: dict[bytes, bytes]) -> ApiError | None:
        path = scope["path"]
        is_open = scope["method"] == "OPTIONS" or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if self._api_key is not None and not is_open and not self._has_key(headers, self._api_key):
            return ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            return self._too_large()
        return None

    @staticmethod
    def _has_key(headers: dict[bytes, bytes], api_key: str) -> bool:
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return hmac.compare_digest(given, api_key.encode())

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body} bytes.", code="body_too_large")

    def _limited(self, receive: Any) -> Any:
        """receive, but a body that came without its length is counted."""
        seen = 0

        async def limited() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise self._too_large()
            return message

        return limited
