"""Processes and their lives: the HTTP server here, the engine in a child process, signals, draining and exit
codes.

Exit codes: 0 stopped as asked, 1 the engine failed or could not start, 2 a second signal cut the draining
short.

    SIGTERM or SIGINT -> /ready says 503, new requests get 503, open ones go on -> all done, or the shutdown
    timeout -> the engine is told to stop -> exit. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from minisgl.server.api import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_client import EngineClient
from minisgl.server.engine_process import EngineFactory, run_engine
from minisgl.server.errors import ApiError
from minisgl.server.ipc import Addresses, ApiEnd
from minisgl.server.service import Service
from minisgl.server.tokenizer import TokenizerPool
from minisgl.text import Tokenizer

try:
    import uvicorn
    import uvloop
except ImportError as error:
    raise ImportError("the server needs more packages: pip install 'minisgl[server]'") from error

logger = logging.getLogger(__name__)
EXIT_OK, EXIT_FAILED, EXIT_FORCED = 0, 1, 2
_ENGINE_EXIT_SECONDS = 10.0


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would cut open streams."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `Supervisor`."""
        yield


class Supervisor:
    """Runs one server from start to exit."""

    def __init__(self, config: ServerConfig, service: Service, engine: Any, sock: socket.socket):
        self._config = config
        self._service = service
        self._client = service.client
        self._engine = engine  # a multiprocessing process
        self._socket = sock
        self._forced = asyncio.Event()
        self._stopping = asyncio.Event()
        options = uvicorn.Config(
            create_app(service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            server_header=False,
        )
        self._http = _Server(options)

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until a signal or the engine's death. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_reader(self._engine.sentinel, self._on_engine_exit)
        listening = asyncio.ensure_future(self._client.listen())
        serving = asyncio.ensure_future(self._http.serve([self._socket]))
        announcing = asyncio.ensure_future(self._announce(on_ready))
        await self._stopping.wait()
        code = await self._drain()
        self._client.stop()
        self._http.should_exit = True
        self._http.force_exit = code == EXIT_FORCED
        await asyncio.wait({serving}, timeout=5.0)
        for task in (listening, serving, announcing):
            task.cancel()
        await asyncio.gather(listening, serving, announcing, return_exceptions=True)
        loop.remove_reader(self._engine.sentinel)
        return code

    async def _announce(self, on_ready: Callable[[int], None] | None) -> None:
        await self._client.changed.wait()
        port = self._socket.getsockname()[1]
        if self._client.state == "ready":
            logger.info("serving %s on http://%s:%d", self._service.model_name, self._config.host, port)
            if on_ready is not None:
                on_ready(port)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
        else:
            logger.info("stopping; %d requests are open", self._client.num_open)
            self._client.drain()
            self._stopping.set()

    def _on_engine_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._engine.sentinel)
        if not self._stopping.is_set():
            # a moment, so that the reason it sent on its way out arrives first
            asyncio.get_running_loop().call_later(0.2, self._engine_died)

    def _engine_died(self) -> None:
        self._client.die(f"its process ended with exit code {self._engine.exitcode}")
        logger.error("the engine has stopped: %s", self._client.failure)
        self._stopping.set()

    async def _drain(self) -> int:
        """Wait for open requests. Returns the exit code."""
        if self._client.state == "dead":
            await asyncio.sleep(0.5)  # the error answers are on their way
            return EXIT_FAILED
        waits = {asyncio.ensure_future(self._client.idle.wait()), asyncio.ensure_future(self._forced.wait())}
        timeout = self._config.shutdown_timeout
        _, pending = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if self._client.num_open:
            self._client.fail_open(ApiError(503, "The server is shutting down.", code="shutdown"))
            await asyncio.sleep(0.2)
        return EXIT_FORCED if self._forced.is_set() else EXIT_OK


def _open_socket(config: ServerConfig) -> socket.socket:
    """Bind before anything is loaded, so that a taken port is told at once. ValueError with the remedy."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        raise ValueError(
            f"cannot listen on {config.host}:{config.port} ({error}): choose another --port"
        ) from error
    sock.listen(2048)
    return sock


def serve(
    config: ServerConfig,
    model: str,
    factory: EngineFactory,
    tokenizer_path: str | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> int:
    """Serve a model until told to stop; returns the exit code.

    factory: picklable; builds the scheduler in the engine process. tokenizer_path: where it differs from
    model. on_ready: called with the port once requests are taken. ValueError for a port that is taken, or a
    model without tokenizer.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sock = _open_socket(config)
    addresses = Addresses.create()
    end = ApiEnd(addresses)
    engine = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(factory, addresses), name="engine"
    )
    try:
        engine.start()
        template = _read_template(config.chat_template)
        pool = TokenizerPool(Tokenizer.load(tokenizer_path or model), config.tokenizer_threads, template)
        service = Service(config, model, EngineClient(end, config.max_open_requests), pool)

        async def main() -> int:
            return await Supervisor(config, service, engine, sock).run(on_ready)

        gc.collect()
        gc.freeze()  # a full collection over all imported modules would hold up every stream for a moment
        code = uvloop.run(main())
        pool.close()
        return code
    except BaseException:
        engine.kill()
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, signal.SIG_IGN
            )  # what is left takes seconds at most, and the exit code is known
        _end_process(engine)
        end.close()
        addresses.remove()
        sock.close()
        gc.unfreeze()  # or bound libraries complain at exit about what is never freed


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"--chat-template={path}: {error}") from error


def _end_process(engine: Any) -> None:
    """Wait for the engine to exit by itself, then insist."""
    if engine.pid is None:
        return
    engine.join(_ENGINE_EXIT_SECONDS if engine.exitcode is None else 0)
    if engine.exitcode is None:
        engine.kill()
        engine.join()
