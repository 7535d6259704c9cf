"""The page at / and what feeds it: static files from the package, and numbers of the moment as server-sent events at /live."""

from __future__ import annotations

import asyncio
import base64
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import FileResponse, StreamingResponse

from minisgl.server.answers import JsonAnswer, data_frame
from minisgl.server.errors import ApiError
from minisgl.server.routes import APIRouter, Request, Response, service_of
from minisgl.server.service import Service

router = APIRouter(include_in_schema=False)
WEB = pathlib.Path(__file__).parent / "web"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_EVERY = 0.5  # seconds between two events
_HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


@router.get("/")
async def page() -> Response:
    """The page."""
    return FileResponse(WEB / "index.html", media_type="text/html", headers=_HEADERS)


@router.get("/web/{name}")
async def static(name: str) -> Response:
    """One of the page's files."""
    file = WEB / name
    if file.parent != WEB or file.suffix not in _TYPES or not file.is_file():
        raise ApiError(404, f"There is no file {name!r}.")
    return FileResponse(file, media_type=_TYPES[file.suffix], headers=_HEADERS)


@router.get("/live/now")
async def now(request: Request) -> Response:
    """The numbers of the moment, once."""
    return JsonAnswer(snapshot(service_of(request)))


@router.get("/live")
async def live(request: Request) -> Response:
    """The numbers of the moment, twice a second, until the client leaves or the server stops."""
    service = service_of(request)

    async def events() -> AsyncIterator[bytes]:
        while service.client.state in ("loading", "ready"):
            yield data_frame(snapshot(service))
            await asyncio.sleep(_EVERY)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def snapshot(service: Service) -> dict[str, Any]:
    """State, counters and expert map. heat and resident are base64, layers x experts bytes; see `ipc.ExpertMap`."""
    client = service.client
    experts = client.beat.experts
    return {
        "time": time.time(),
        "state": client.state,
        "model": service.model_name,
        "max_model_len": service.max_model_len,
        "stats": client.beat.stats,
        "experts": None
        if experts is None
        else {
            "layers": experts.num_layers,
            "experts": experts.num_experts,
            "heat": base64.b64encode(experts.heat).decode(),
            "resident": base64.b64encode(experts.resident).decode(),
        },
    }
