"""What the command line calls: serve a model, chat with one. Flags come in as configs, exit codes go out."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from minisgl.config import EngineConfig
from minisgl.models.registry import resolve_model
from minisgl.server.config import ServerConfig
from minisgl.server.engine_factory import ModelEngine
from minisgl.server.launch import serve
from minisgl.server.shell import Shell


def serve_model(
    engine: EngineConfig,
    server: ServerConfig,
    on_ready: Callable[[int], None] | None = None,
    watch_experts: bool = False,
) -> int:
    """Serve a model until told to stop. ValueError, with the remedy, for what cannot work; see `launch` for exit codes.

    watch_experts: feed the expert map of the page at /; see `ModelEngine`.
    """
    model = engine.model
    folder = str(resolve_model(model.model, model.model_source, model.revision))
    name = model.model.rstrip("/") or folder
    return serve(server, name, ModelEngine(engine, folder, watch_experts), folder, on_ready)


def chat_with_url(url: str, api_key: str | None = None) -> int:
    """Chat with a running server."""
    return asyncio.run(Shell(url, api_key).run())


def chat_with_model(engine: EngineConfig, server: ServerConfig) -> int:
    """Start a server of one's own on a free port, chat with it, stop it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    quiet = dataclasses.replace(server, host="127.0.0.1", port=0, log_level="warning")
    process = context.Process(target=_serve_apart, args=(engine, quiet, there))
    process.start()
    there.close()
    try:
        port = here.recv()
    except EOFError:  # it ended without being ready, and has said why
        process.join()
        return process.exitcode or 1
    try:
        return chat_with_url(f"http://127.0.0.1:{port}", server.api_key)
    finally:
        process.terminate()
        process.join()


def _serve_apart(engine: EngineConfig, server: ServerConfig, ready: Any) -> None:
    os.setsid()  # Ctrl-C in the shell stops an answer, not the server
    raise SystemExit(serve_model(engine, server, ready.send))
