"""Replicas of the server behind Ray Serve: pip install 'minisgl[server,ray]'.

    python examples/ray_serve.py demo --device cpu --min-replicas 2 --max-replicas 2
    python examples/ray_serve.py Qwen/Qwen3-30B-A3B --tp 2 --max-replicas 4 --host 0.0.0.0      # eight GPUs, if it is busy

    client --> Ray's HTTP proxy --> Front --> Ray's prefix-aware router --> Replica: the FastAPI application, an engine process

A `Replica` is the whole server: the application of `minisgl serve` with an engine (all ranks of it) of its own. Ray starts as
many as the load needs, asks each whether it is well, and replaces those that are not. `Front` exists because Ray's proxy gives
up a request whose replica dies: it keeps the request until the first byte of the answer has come, and asks another replica if
none ever comes. From then on an answer belongs to its replica, and ends early if that dies.

Ray's `PrefixCacheAffinityRouter` sends texts that begin alike to the same replica, whose prefix cache then has their beginning;
it goes by load where replicas are unequally busy. --no-prefix-routing goes by load alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from minisgl.config import EngineConfig, add_engine_flags, engine_options
from minisgl.flags import add_flags
from minisgl.models.registry import resolve_model
from minisgl.server.api import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_client import EngineClient
from minisgl.server.engine_factory import ModelEngine
from minisgl.server.engine_process import run_engine
from minisgl.server.ipc import Addresses, ApiEnd
from minisgl.server.service import Service
from minisgl.server.tokenizer import TokenizerPool
from minisgl.text import Tokenizer

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as missing:
    raise SystemExit("this example needs Ray: pip install 'minisgl[server,ray]'") from missing

# Its public name, ray.serve.llm.request_router, can be imported only where vLLM or SGLang is installed.
ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
SILENCE_S = 10.0  # without a sign of life of a replica's engine
PATIENCE_S = 120.0  # how long a request may look for a replica that answers
PAUSE_S = 0.2  # before another replica is asked: Ray needs a moment to see that one is gone


@dataclasses.dataclass(frozen=True)
class Call:
    """An HTTP request on its way to a replica. prompt: the text that the router compares; it must not be empty."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: Any


def prompt_of(path: str, body: bytes) -> Any:
    """What the router goes by: "prompt", "messages" or "input" of the body, else the path."""
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        fields = json.loads(body)
        if isinstance(fields, dict):
            for name in ("messages", "prompt", "input"):
                if fields.get(name) and isinstance(fields[name], (str, list)):
                    return fields[name] if isinstance(fields[name], str) else json.dumps(fields[name])
    return path


ENGINE_GONE = {"type": "minisgl.engine-gone"}
"""In place of an answer that had not begun when the replica's engine died: another replica may answer."""


@serve.ingress()
class Replica:
    """One server, its engine in a child process that ends with it."""

    async def __init__(self, config: ServerConfig, engine: EngineConfig, folder: str) -> None:
        """Returns when the model is loaded, so that no request waits for it. RuntimeError, with the reason, if it can't be."""
        name = serve.get_replica_context().replica_id.unique_id
        self._name = f"{name}-{os.getpid()}".encode()  # for the header x-replica
        self._addresses = Addresses.create()
        recipe = ModelEngine(engine, folder)
        spawn = multiprocessing.get_context("spawn")
        self._engine = spawn.Process(target=run_engine, args=(recipe, self._addresses), name="engine")
        self._client = EngineClient(ApiEnd(self._addresses), config.max_open_requests)
        self._engine.start()
        asyncio.get_running_loop().add_reader(self._engine.sentinel, self._on_engine_exit)
        self._listening = asyncio.ensure_future(self._client.listen())
        template = pathlib.Path(config.chat_template).read_text("utf-8") if config.chat_template else None
        pool = TokenizerPool(Tokenizer.load(folder), config.tokenizer_threads, template)
        self._app = create_app(Service(config, engine.model.model, self._client, pool))
        await self._client.changed.wait()
        if self._client.state != "ready":
            raise RuntimeError(f"the engine could not start: {self._client.failure}")

    def _on_engine_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._engine.sentinel)
        self._client.die(f"its process ended with exit code {self._engine.exitcode}")

    def __serve_build_asgi_app__(self) -> Any:
        """The same application that `minisgl serve` runs, for `serve.ingress`."""
        return self._app

    def check_health(self) -> None:
        """Asked by Ray every few seconds; a replica that raises is replaced."""
        if self._client.state == "dead":
            raise RuntimeError(f"the engine has stopped: {self._client.failure}")
        silent = time.monotonic() - self._client.last_beat
        if silent > SILENCE_S:
            raise RuntimeError(f"the engine has been silent for {silent:.0f} s")

    async def answer(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The application's ASGI messages for one request; ENGINE_GONE if the engine died before the first byte of a body."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        task = asyncio.ensure_future(self._app(_scope(call), _Body(call.body), messages.put))  # type: ignore[arg-type]
        begun = False
        try:
            while True:
                waiting = asyncio.ensure_future(messages.get())
                await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    task.result()
                    return
                message = waiting.result()
                if not begun and self._client.state == "dead":
                    yield ENGINE_GONE
                    return
                begun = begun or bool(message.get("body"))
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", self._name)]
                yield message
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    return
        finally:
            task.cancel()  # also when the client has gone, which aborts the request in the engine
            await asyncio.gather(task, return_exceptions=True)

    def __del__(self) -> None:
        if hasattr(self, "_client"):
            self._client.stop()
            self._listening.cancel()
            self._engine.join(5)
            self._engine.kill()
            self._client.close()
        self._addresses.remove()


class _Body:
    """ASGI's receive: the whole body at once, then nothing; that the client left is told by cancelling."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": None,
        "server": None,
    }


class Front:
    """Passes requests on to replicas, and again to another one as long as nothing of an answer has been passed back."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        """replicas: Ray's handle of the `Replica` deployment."""
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica, which is asked when Ray sends the response."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:  # enough for a replica to refuse it
                break
        path, headers = request.url.path, list(request.headers.raw)
        query = request.scope["query_string"]
        return Forwarded(
            self._replicas, Call(request.method, path, query, headers, body, prompt_of(path, body))
        )


class Forwarded(Response):
    """A response that comes from whichever replica answers."""

    def __init__(self, replicas: Any, call: Call) -> None:
        super().__init__()
        self._replicas, self._call = replicas, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks until a replica has answered or patience is over."""
        deadline = time.monotonic() + PATIENCE_S
        while not await self._ask(send, may_retry=time.monotonic() < deadline):
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, send: Send, may_retry: bool) -> bool:
        """Whether a replica has answered. Its head is kept back until the body begins: that is what can't be taken back."""
        held: list[dict[str, Any]] = []
        begun = False
        try:
            async for message in self._replicas.remote(self._call):
                if message == ENGINE_GONE:
                    if not may_retry:
                        raise RuntimeError("no replica has a living engine")
                    return False
                held.append(message)
                last = message["type"] == "http.response.body" and not message.get("more_body", False)
                if begun or last or message.get("body"):
                    begun = True
                    while held:
                        await send(held.pop(0))
        except RayActorError:  # its process is gone, or its machine
            if begun or not may_retry:
                raise
            return False
        return True


def build(args: argparse.Namespace) -> Any:
    """The Ray Serve application that the flags describe. ValueError, with the remedy, for what cannot work."""
    names = {field.name for field in dataclasses.fields(ServerConfig)}
    config = ServerConfig(**{name: value for name, value in vars(args).items() if name in names})
    engine = EngineConfig.from_kwargs(**engine_options(args) | {"model": args.name})
    model = engine.model
    folder = str(resolve_model(model.model, model.model_source, model.revision, offline=model.offline))
    at_once = engine.scheduler.max_running_requests
    on_cpu = model.device == "cpu" or (model.device == "auto" and not ray.cluster_resources().get("GPU"))
    gpus = 0 if on_cpu else engine.parallel.tensor_parallel_size
    by_prefix = RequestRouterConfig(
        request_router_class=ROUTER,  # type: ignore[arg-type]
        request_router_kwargs={"imbalanced_threshold": max(4, at_once // 4), "do_eviction": True},
    )
    replica = serve.deployment(
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=max(args.max_replicas, args.min_replicas),
            target_ongoing_requests=max(1.0, at_once / 2),
        ),
        max_ongoing_requests=2
        * at_once,  # some wait in the engine, so that a finished one is followed at once
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        request_router_config=RequestRouterConfig() if args.no_prefix_routing else by_prefix,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": gpus},
    )(Replica)
    front = serve.deployment(
        num_replicas=args.fronts, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )(Front)
    return front.bind(replica.bind(config, engine, folder), config.max_body_bytes)


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="MODEL", help="path, hub id or bundled name")
    parser.add_argument("--min-replicas", type=int, default=1, help="replicas that are always there")
    parser.add_argument("--max-replicas", type=int, default=1, help="replicas under load")
    parser.add_argument("--fronts", type=int, default=1, help="processes that pass requests on")
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores that Ray sets aside for a replica")
    parser.add_argument("--no-prefix-routing", action="store_true", help="send requests where few run")
    add_flags(parser, list(dataclasses.fields(ServerConfig)), "server")
    add_engine_flags(parser)
    args = parser.parse_args()
    options = vars(args)
    ray.init(include_dashboard=False, log_to_driver=False)  # or the cluster that RAY_ADDRESS names
    try:
        application = build(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    serve.start(http_options={"host": options.get("host", "127.0.0.1"), "port": options.get("port", 8000)})
    serve.run(application, name="minisgl", route_prefix="/")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    print("READY", flush=True)
    stopped.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
