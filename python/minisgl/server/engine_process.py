"""The engine process: a loop that feeds a scheduler from a socket and sends back what each step brought.

One thread, nothing concurrent: between two steps all waiting commands are taken in, so a step never sees
half an update.
A request that the scheduler refuses is answered and forgotten; an error in a step is the end of the process,
because device state is unknown after it, and the API process then tells every open request.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from minisgl.core import FinishReason, Request, StepOutput
from minisgl.server.ipc import (
    Abort,
    Add,
    Addresses,
    Beat,
    Command,
    EngineEnd,
    EngineFacts,
    ExpertMap,
    Failed,
    Outputs,
    Ready,
    Rejected,
    Stop,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_IDLE_WAIT = 0.1  # seconds between looks at the parent process while there is no work


class SchedulerLike(Protocol):
    """What the loop needs of a scheduler; `minisgl.scheduler.scheduler.Scheduler` is the real one."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. ValueError, with the remedy, if it can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its last output says ABORT. Unknown ids are ignored."""
        ...

    def step(self) -> list[StepOutput]:
        """Run one engine step; every request ends with exactly one output that has a finish reason."""
        ...

    def stats(self) -> Any:
        """A dataclass of numbers."""
        ...


@dataclass(frozen=True)
class EngineParts:
    """What the engine process runs. experts: gives the expert map of the moment, None for models without. numbers: more of
    them for every beat, beside the scheduler's.

    check: called at every beat; raises if the engine can't go on though no step is running. close: called once at the end.
    """

    scheduler: SchedulerLike
    facts: EngineFacts
    experts: Callable[[], ExpertMap | None] = lambda: None
    numbers: Callable[[], dict[str, float]] = dict
    check: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


EngineFactory = Callable[[], EngineParts]


class EngineLoop:
    """Commands in, steps, events out, until told to stop or the parent is gone."""

    def __init__(self, parts: EngineParts, end: EngineEnd, parent_alive: Callable[[], bool] = lambda: True):
        self._scheduler = parts.scheduler
        self._experts, self._numbers = parts.experts, parts.numbers
        self._check = parts.check
        self.facts = parts.facts
        self._end = end
        self._parent_alive = parent_alive
        self._last_beat = 0.0
        self._stopped = False

    def run(self) -> None:
        """Loop until `Stop`, or until the parent process is gone. Errors of a step pass through."""
        while not self._stopped:
            working = self._scheduler.has_work
            for command in self._end.receive(0.0 if working else _IDLE_WAIT):
                self._apply(command)
            if self._scheduler.has_work:
                outputs = self._scheduler.step()
                if outputs:
                    self._end.send(Outputs(outputs))
            self.beat()

    def _apply(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopped = True
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._scheduler.abort(request_id)
        elif isinstance(command, Add):
            self._add(command.request)

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except ValueError as error:
            self._end.send(Rejected(request.request_id, str(error)))
        except Exception as error:  # one odd request must not take the others down
            logger.exception("request %s could not be added", request.request_id)
            failed = StepOutput(request.request_id, None, finish_reason=FinishReason.ERROR, error=repr(error))
            self._end.send(Outputs([failed]))

    def beat(self) -> None:
        """Send the numbers of the moment, if the last ones are old enough; look whether the parent lives."""
        now = time.monotonic()
        if now - self._last_beat < BEAT_SECONDS:
            return
        self._last_beat = now
        self._check()
        self._end.send(Beat(numbers_of(self._scheduler.stats()) | self._numbers(), self._experts()))
        self._stopped = self._stopped or not self._parent_alive()


def numbers_of(stats: Any) -> dict[str, float]:
    """The numbers of a stats dataclass, nested ones joined with an underscore."""
    numbers: dict[str, float] = {}
    _collect("", asdict(stats), numbers)
    return numbers


def _collect(prefix: str, values: dict[str, Any], numbers: dict[str, float]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _collect(f"{prefix}{name}_", value, numbers)
        elif isinstance(value, (int, float)):
            numbers[prefix + name] = float(value)


def run_engine(factory: EngineFactory, addresses: Addresses) -> None:
    """Entry point of the process: build the scheduler, report readiness, loop. Exits with 1 on any failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API process decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    end = EngineEnd(addresses)
    loaded = threading.Event()
    threading.Thread(target=_end_with, args=(parent, loaded), daemon=True).start()
    try:
        parts = _build(factory)
        loaded.set()
        with contextlib.closing(parts):
            loop = EngineLoop(parts, end, parent.is_alive if parent else lambda: True)
            loop.beat()  # first, so that whoever waits for readiness finds numbers
            end.send(Ready(loop.facts))
            loop.run()
    except _CannotStart as error:
        end.send(Failed(str(error)))
        raise SystemExit(1) from error
    except Exception as error:
        logger.exception("the engine failed")
        end.send(Failed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error
    finally:
        end.close()


def _end_with(parent: Any, loaded: threading.Event) -> None:
    """Loading may take minutes and looks at nothing; without a parent it would be for nobody. The loop looks for itself."""
    if parent is not None:
        parent.join()
        if not loaded.is_set():
            os._exit(1)


class _CannotStart(Exception):
    """The user asked for what cannot work; the message says what would. Not worth a traceback."""


def _build(factory: EngineFactory) -> EngineParts:
    try:
        return factory()
    except ValueError as error:
        raise _CannotStart(str(error)) from error
