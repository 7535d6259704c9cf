"""Fetching a snapshot from Hugging Face, with one bar for all of it: bytes, GB/s, and the time that is left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils import tqdm
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def download(model: str, **options: Any) -> str:
    """`snapshot_download` of huggingface_hub; on a terminal with our bar. What was fetched before is not fetched again."""
    if options.get("local_files_only") or not sys.stderr.isatty():
        return snapshot_download(model, **options)
    missing = [file for file in snapshot_download(model, dry_run=True, **options) if file.will_download]
    if not missing:
        return snapshot_download(model, **options)
    columns = (
        TextColumn(f"fetching {len(missing)} files of {model}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(file.file_size or 0 for file in missing))
        kind = reporting_bar(lambda num_bytes: bar.update(task, completed=num_bytes))
        return snapshot_download(model, tqdm_class=kind, **options)


def reporting_bar(report: Callable[[int], object]) -> Any:
    """A class of progress bars for huggingface_hub that show nothing and tell `report` how many bytes are done.

    The library counts the same bytes in several bars (received, written): the one that is ahead counts here.
    """
    lock, most = threading.Lock(), 0

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes, self._done = kwargs.get("unit") == "B", 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            if self._counts_bytes:
                with lock:
                    self._done += int(n or 0)
                    if self._done > most:
                        most = self._done
                        report(most)
            return None

    return Reporting
