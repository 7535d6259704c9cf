"""How bodies are read: as JSON by orjson, which takes no NaN, no Infinity and no number too large for a
float.
"""

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
    """A request whose JSON is parsed strictly."""

    async def json(self) -> Any:
        """The parsed body; FastAPI makes a validation error of the JSONDecodeError."""
        return orjson.loads(await self.body())


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`, and reads it before FastAPI would wrap what goes
    wrong.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook for a custom request class."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST" and "json" not in request.headers.get("content-type", ""):
                raise bad_request("The body must be JSON: send the header Content-Type: application/json.")
            request = StrictRequest(request.scope, request.receive)
            await request.body()
            return await handler(request)

        return strict


def service_of(request: Request) -> Service:
    """The service that this application was made for."""
    return request.app.state.service
