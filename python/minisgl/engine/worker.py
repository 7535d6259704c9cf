"""A rank above 0: builds the engine with its own shards, then repeats the steps that rank 0 sends, until told to stop.

`python -m minisgl.engine.worker` is what rank 0 starts on its own machine; a launcher's ranks call `follow` themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[reportPrivateImportUsage]

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.ranks import ConnectedRanks, received_setup
from minisgl.engine.step import EngineLost
from minisgl.parallel import Rendezvous


def follow(engine: Engine) -> None:
    """Run rank 0's steps. Returns when rank 0 closes; raises EngineLost when a rank fails."""
    ranks = engine.ranks
    assert isinstance(ranks, ConnectedRanks) and ranks.is_follower
    while (chunks := ranks.receive()) is not None:
        engine.launch(chunks)
    engine.close()


def follow_launcher(config: EngineConfig, folder: Path) -> bool:
    """For commands of which rank 0 alone does the work: if a launcher started this process as a rank above 0 of --tp, follow
    rank 0 to its end and return True.
    """
    place = Rendezvous.from_environment()
    if place is None or place.rank == 0 or config.parallel.tensor_parallel_size == 1:
        return False
    follow(Engine(config, folder))
    return True


def main() -> int:
    """Entry point of a child rank; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    place = Rendezvous.from_environment()
    assert place is not None
    store = TCPStore(place.address, place.port, is_master=False)
    setup = received_setup(store)
    ranks = ConnectedRanks(place, store, setup.config)
    try:
        with ranks.guard():
            follow(Engine(setup.config, Path(setup.folder), ranks=ranks))
    except EngineLost as error:
        print(f"minisgl: rank {place.rank} ends: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # not past exit handlers, which may wait for a rank that is gone
    return 0


def _end_with_parent() -> None:
    """Standard input is a pipe that closes when rank 0 ends, in whatever way."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
