"""Downloads through the real client of Hugging Face from a hub in this process: only what is needed, resumed, pinned."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from minisgl.models import download as module
from minisgl.models import registry
from minisgl.models.download import download, reporting_bar
from minisgl.models.registry import resolve_model
from tests.fake_hub import FakeHub, running

MODEL = "owner/name"
MB = 2**20
WEIGHTS = bytes(range(256)) * (12 * MB // 256)  # more than the client reads at a time
FILES = {
    "main": {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ x }}",
        "model-00001-of-00002.safetensors": WEIGHTS,
        "model-00002-of-00002.safetensors": b"second",
        "pytorch_model.bin": b"the same once more",
        "consolidated.safetensors": b"and again",
        "original/model.safetensors": b"and again",
        "README.md": b"# words",
    },
    "v1": {"config.json": b'{"version": 1}', "model.safetensors": b"old"},
}
NEEDED = sorted(name for name in FILES["main"] if name.startswith(("config", "tok", "chat", "model-")))
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(MODEL, FILES)) as server:
        there = partial(download, endpoint=server.url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(registry, "download", there)
        yield server


def test_only_what_is_needed_and_once(hub: FakeHub) -> None:
    folder = resolve_model(MODEL)
    assert sorted(path.name for path in folder.iterdir()) == NEEDED == sorted(hub.fetched())
    assert (folder / FIRST).read_bytes() == WEIGHTS
    assert resolve_model(MODEL) == folder and sorted(hub.fetched()) == NEEDED


def test_text_alone(hub: FakeHub) -> None:
    folder = resolve_model(MODEL, weights=False)
    assert sorted(path.name for path in folder.iterdir()) == [n for n in NEEDED if "model-" not in n]


def test_a_lost_connection_goes_on_where_it_ended(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut[FIRST] = 11 * MB
    folder = resolve_model(MODEL)
    assert (folder / FIRST).read_bytes() == WEIGHTS
    ranges = [part for method, path, part in hub.requests if method == "GET" and path.endswith(FIRST)]
    assert len(ranges) == 2 and ranges[0] is None
    assert ranges[1] is not None and int(ranges[1].removeprefix("bytes=").rstrip("-")) >= 10 * MB


def test_a_revision_is_pinned(hub: FakeHub) -> None:
    old = resolve_model(MODEL, revision="v1")
    assert (old / "config.json").read_bytes() == b'{"version": 1}'
    assert resolve_model(MODEL, revision=hub.commit("v1")) == old
    assert old.name == hub.commit("v1") and resolve_model(MODEL).name == hub.commit("main")
    with pytest.raises(ValueError, match="has no revision 'v9': use a branch, tag or commit"):
        resolve_model(MODEL, revision="v9")


def test_offline_takes_what_is_there_and_asks_nobody(hub: FakeHub) -> None:
    with pytest.raises(ValueError, match=r"--offline: owner/name is not in the cache, whole"):
        resolve_model(MODEL, offline=True)
    folder = resolve_model(MODEL)
    hub.requests.clear()
    assert resolve_model(MODEL, offline=True) == folder
    with pytest.raises(ValueError, match=r"--offline: owner/name at v1 is not in the cache"):
        resolve_model(MODEL, revision="v1", offline=True)
    assert not hub.requests


def test_offline_is_not_content_with_half_a_model(hub: FakeHub) -> None:
    resolve_model(MODEL, weights=False)
    with pytest.raises(ValueError, match=r"not in the cache, whole"):
        resolve_model(MODEL, offline=True)


def test_no_such_model(hub: FakeHub) -> None:
    with pytest.raises(ValueError, match="has no model 'owner/other'"):
        resolve_model("owner/other")


def test_a_bar_of_all_bytes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    bars = []
    monkeypatch.setattr(module, "Progress", lambda *c, **o: bars.append(SavedProgress(*c, **o)) or bars[-1])
    resolve_model(MODEL)
    (bar,) = bars
    (task,) = bar.tasks
    assert task.total == task.completed == sum(len(FILES["main"][name]) for name in NEEDED)
    names = [type(column).__name__ for column in bar.columns]
    assert {"TransferSpeedColumn", "TimeRemainingColumn", "DownloadColumn"} <= set(names)
    assert f"fetching {len(NEEDED)} files of {MODEL}" in terminal.getvalue()
    resolve_model(MODEL)
    assert len(bars) == 1, "nothing to fetch, nothing to show"


class SavedProgress(module.Progress):
    pass


def test_bytes_that_several_bars_count_are_counted_once() -> None:
    seen: list[int] = []
    kind = reporting_bar(seen.append)
    received, written = (kind(total=100, unit="B", unit_scale=True, name=n, desc=n) for n in ("a", "b"))
    files = kind(total=3, desc="Fetching 3 files")
    for bar, amount in ((received, 40), (written, 40), (files, 1), (written, 30), (received, 60)):
        bar.update(amount)
    assert seen == [40, 70, 100]


def test_modelscope_is_asked_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict = {}

    def snapshot_download(model: str, **options) -> str:
        seen.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    assert resolve_model(MODEL, "modelscope", revision="v1", offline=True) == tmp_path
    assert (seen["model"], seen["revision"], seen["local_files_only"]) == (MODEL, "v1", True)
    assert "*.safetensors" in seen["allow_patterns"] and "*/*" in seen["ignore_patterns"]
