"""What crosses between the API process and the engine process, and the two ends of the ZeroMQ pipes it
crosses on.

A request crosses twice (in: `Add`, out: its last output) and a token once. All outputs of one engine step
travel in one message, so the cost of a message is shared by the whole batch. Messages are msgpack, encoded
by msgspec straight from the dataclasses of `core`; decoding runs their validation again, so a malformed
message cannot enter a queue.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

from minisgl.core import Request, StepOutput

try:
    import msgspec
    import zmq
    import zmq.asyncio
except ImportError as error:
    raise ImportError("the server needs more packages: pip install 'minisgl[server]'") from error


class Add(msgspec.Struct, tag=True):
    """API -> engine: run this request."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """API -> engine: forget these requests; unknown ids are ignored."""

    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    """API -> engine: leave the loop and exit."""


@dataclass(frozen=True)
class EngineFacts:
    """What the API must know of a loaded model: context length in tokens, vocabulary, size of the expert
    map.
    """

    max_model_len: int
    vocab_size: int
    num_layers: int = 0
    num_experts: int = 0


class Ready(msgspec.Struct, tag=True):
    """Engine -> API: the model is loaded."""

    facts: EngineFacts


class Outputs(msgspec.Struct, tag=True):
    """Engine -> API: all outputs of one step."""

    outputs: list[StepOutput]


class Rejected(msgspec.Struct, tag=True):
    """Engine -> API: a request that can never run. message says why and what would help."""

    request_id: str
    message: str


class ExpertMap(msgspec.Struct):
    """How often each expert was used lately and where it is: `heat` and `resident` are layers x experts, row
    by row.

    heat: 0 to 255, scaled to the hottest expert. resident: 1 where the expert is in GPU memory.
    """

    num_layers: int
    num_experts: int
    heat: bytes
    resident: bytes


class Beat(msgspec.Struct, tag=True):
    """Engine -> API, a few times a second: numbers for metrics and the live view."""

    stats: dict[str, float]
    experts: ExpertMap | None = None


class Failed(msgspec.Struct, tag=True):
    """Engine -> API: the engine cannot go on; its process ends."""

    message: str


Command = Add | Abort | Stop
Event = Ready | Outputs | Rejected | Beat | Failed


@dataclass(frozen=True)
class Addresses:
    """ZeroMQ addresses of the pipe into the engine and the pipe out of it."""

    commands: str
    events: str

    @classmethod
    def create(cls) -> Addresses:
        """Two Unix sockets in a fresh folder only this user can enter. Remove it with `remove`."""
        folder = tempfile.mkdtemp(prefix="minisgl-")
        return cls(f"ipc://{folder}/commands", f"ipc://{folder}/events")

    def remove(self) -> None:
        """Delete the folder of the sockets."""
        shutil.rmtree(os.path.dirname(self.commands.removeprefix("ipc://")), ignore_errors=True)


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the number of open requests, never dropped
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)  # ms: time for the last message of a process that ends
    return socket


class EngineEnd:
    """The engine's side: blocking, because the engine loop has nothing else to do while it waits."""

    def __init__(self, addresses: Addresses):
        self._context = zmq.Context()
        self._commands = _socket(self._context, zmq.PULL)
        self._events = _socket(self._context, zmq.PUSH)
        self._commands.bind(addresses.commands)
        self._events.connect(addresses.events)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, wait_seconds: float) -> list[Command]:
        """All commands that are there; waits for the first one at most so long."""
        commands = []
        if wait_seconds > 0 and not self._commands.poll(int(wait_seconds * 1000)):
            return commands
        while True:
            try:
                commands.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def send(self, event: Event) -> None:
        """Queue one event for the API process."""
        self._events.send(self._encoder.encode(event))

    def close(self) -> None:
        """Close the sockets after what was sent has left."""
        self._context.destroy(linger=1000)


class ApiEnd:
    """The API's side: receiving waits in asyncio, sending never waits.

    Each side binds the pipe that it reads and connects the one that it writes: a connecting socket queues what is sent before
    the other side is there, a binding one would drop it.
    """

    def __init__(self, addresses: Addresses):
        self._context = zmq.Context()
        self._receiving = zmq.asyncio.Context.shadow(self._context)
        self._commands = _socket(self._context, zmq.PUSH)
        self._events = _socket(self._receiving, zmq.PULL)
        self._commands.connect(addresses.commands)
        self._events.bind(addresses.events)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Event)

    def send(self, command: Command) -> None:
        """Queue one command for the engine, even if it is not there yet."""
        self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self) -> Event:
        """The next event."""
        return self._decoder.decode(await self._events.recv())

    def close(self) -> None:
        """Close the sockets; what no engine has taken by now is dropped."""
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
