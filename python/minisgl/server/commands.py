"""The commands `serve`, `chat` and `bench-serve`: flags to configs, configs to processes, exit codes back."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from minisgl.config import EngineConfig, add_engine_flags, engine_options
from minisgl.engine.worker import follow_launcher
from minisgl.flags import add_flags
from minisgl.models.registry import resolve_model
from minisgl.planner import apply_auto
from minisgl.server import bench_client
from minisgl.server.bench_client import BenchConfig
from minisgl.server.config import ServerConfig
from minisgl.server.engine_factory import ModelEngine
from minisgl.server.launch import serve
from minisgl.server.shell import Shell


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve`; the model may also stand without its flag."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--auto", action="store_true", help="take the flags that `minisgl plan` recommends")
    parser.add_argument(
        "--watch-experts", action="store_true", help="feed the expert map of the page (costs CUDA graphs)"
    )
    _add_config_flags(parser, ServerConfig, "server")
    add_engine_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    return serve_model(_engine_config(args), _config(args, ServerConfig), watch_experts=args.watch_experts)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `chat`: a running server, or a model to start one with."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--url", help="chat with the server at this address instead of starting one")
    parser.add_argument("--auto", action="store_true", help="take the flags that `minisgl plan` recommends")
    _add_config_flags(parser, ServerConfig, "server")
    add_engine_flags(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Chat until the user leaves."""
    server = _config(args, ServerConfig)
    if args.url:
        return chat_with_url(args.url, server.api_key)
    return chat_with_model(_engine_config(args), server)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench-serve`."""
    _add_config_flags(parser, BenchConfig, "load")


def run_bench(args: argparse.Namespace) -> int:
    """Load a server; exit code 1 if a request failed."""
    return bench_client.main(_config(args, BenchConfig))


def _add_config_flags(parser: argparse.ArgumentParser, config: type, title: str) -> None:
    add_flags(parser, list(dataclasses.fields(config)), title)


def _config(args: argparse.Namespace, config: Any) -> Any:
    """An instance of a config class from the flags that were given."""
    names = {item.name for item in dataclasses.fields(config)}
    return config(**{name: value for name, value in vars(args).items() if name in names})


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    options = engine_options(args)
    if args.name:
        options["model"] = args.name
    if not options.get("model"):
        raise ValueError("no model was named: give --model PATH, a hub id, or --model demo")
    if args.auto:
        options = apply_auto(options, Console(stderr=True))
    return EngineConfig.from_kwargs(**options)


def serve_model(
    engine: EngineConfig,
    server: ServerConfig,
    on_ready: Callable[[int], None] | None = None,
    watch_experts: bool = False,
) -> int:
    """Serve a model until told to stop; a launcher's ranks above 0 follow rank 0 instead. See `launch` for exit codes.

    ValueError, with the remedy, for what cannot work.
    watch_experts: feed the expert map of the page at /; see `ModelEngine`.
    """
    model = engine.model
    folder = str(resolve_model(model.model, model.model_source, model.revision, offline=model.offline))
    if follow_launcher(engine, Path(folder)):
        return 0
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
        try:
            port = here.recv()
        except EOFError:  # it ended without being ready, and has said why
            process.join()
            return process.exitcode or 1
        return chat_with_url(f"http://127.0.0.1:{port}", server.api_key)
    finally:
        process.terminate()
        process.join()


def _serve_apart(engine: EngineConfig, server: ServerConfig, ready: Any) -> None:
    os.setsid()  # Ctrl-C in the shell stops an answer, not the server
    threading.Thread(target=_end_with_parent, daemon=True).start()
    raise SystemExit(serve_model(engine, server, ready.send))


def _end_with_parent() -> None:
    """A terminal that is closed kills the chat, which then stops nothing any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
