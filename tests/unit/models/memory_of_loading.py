"""How much anonymous memory loading takes, in a process that has freed none before: `memory_of_loading FOLDER` prints bytes."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec
from tests.unit.models.decoder_harness import Session, empty_decoder


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def main(folder: Path) -> None:
    decoder = empty_decoder(ModelSpec.from_folder(folder))
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        load_weights(decoder, folder)
    finally:
        done.set()
        watcher.join()
    assert Session(decoder, 1, 8).step([(0, [1, 2])]).isfinite().all()
    print(peak - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
