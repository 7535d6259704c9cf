"""How bodies are read: JSON by orjson (which takes no NaN or Infinity), whatever the content type says."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from minisgl.server.errors import bad_request
from minisgl.server.service import Service

try:
    import orjson
    from fastapi import APIRouter, Request, Response
    from fastapi.routing import APIRoute
except ImportError as error:
    raise ImportError("the server needs more packages: pip install 'minisgl[server]'") from error

__all__ = ["APIRouter", "Request", "Response", "StrictRoute", "service_of"]


class StrictRequest(Request):
    """A request whose JSON is strict."""

    async def json(self) -> Any:
        """The parsed body. ApiError 400 if it is not JSON."""
        body = await self.body()
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook for a custom request class."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def service_of(request: Request) -> Service:
    """The service that this application was made for."""
    return request.app.state.service
