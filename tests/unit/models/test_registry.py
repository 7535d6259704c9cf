"""What a user calls a model becomes a folder, or an error with a remedy. No test here touches the network."""

import sys
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from minisgl.models import registry
from minisgl.models.registry import resolve_model


def test_folders(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("~/models") == tmp_path / "models"
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="is a file: give the folder"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "name", ["", "/no/such/folder", "./nowhere", "~/nothing/here", "a/b/c", "two words", "../x"]
)
def test_neither_folder_nor_id(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match=r"no such folder.*demo, smollm2, or an id"):
        resolve_model(name)


def test_unknown_source():
    with pytest.raises(ValueError, match="unknown model source 'ftp': use one of huggingface, modelscope"):
        resolve_model("owner/name", "ftp")


def test_bundled_names(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "DEMO_FOLDER", tmp_path / "demo")
    with pytest.raises(ValueError, match="no bundled demo model"):
        resolve_model("demo")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    assert resolve_model("demo") == tmp_path / "demo"


def test_hugging_face_gets_what_is_needed(tmp_path, monkeypatch):
    calls = []

    def download(model, **options):
        calls.append((model, options))
        return str(tmp_path)

    monkeypatch.setattr(registry, "download", download)
    assert resolve_model("owner/name", revision="v1") == tmp_path
    resolve_model("owner/name", weights=False)
    (model, with_weights), (_, without) = calls
    assert (model, with_weights["revision"], without["revision"]) == ("owner/name", "v1", None)
    assert "*.safetensors" in with_weights["allow_patterns"]
    assert "*.safetensors" not in without["allow_patterns"]
    assert "*.json" in without["allow_patterns"]
    assert not with_weights["local_files_only"]
    resolve_model("owner/name", offline=True)
    assert calls[-1][1]["local_files_only"]


def _http(kind):
    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/x"))
    return kind("no", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http(GatedRepoError), "is gated: accept its terms on huggingface.co/owner/name"),
        (_http(RepositoryNotFoundError), "no model 'owner/name'.*check the spelling"),
        (_http(RevisionNotFoundError), "no revision 'v9'"),
        (
            LocalEntryNotFoundError("offline\nand more"),
            r"check the network.*\(LocalEntryNotFoundError: offline\)$",
        ),
        (httpx.ConnectError(""), r"or give a local folder. \(ConnectError\)$"),
    ],
)
def test_hub_errors_name_the_remedy(monkeypatch, error, message):
    def fail(model, **options):
        raise error

    monkeypatch.setattr(registry, "download", fail)
    with pytest.raises(ValueError, match=message):
        resolve_model("owner/name", revision="v9")


def test_offline_says_so(monkeypatch):
    def fail(model, **options):
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(registry, "download", fail)
    with pytest.raises(
        ValueError, match=r"--offline: owner/name at v9 is not in the cache, whole: leave out"
    ):
        resolve_model("owner/name", revision="v9", offline=True)


def test_modelscope(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)  # as if not installed
    with pytest.raises(ValueError, match="pip install modelscope"):
        resolve_model("owner/name", "modelscope")
    seen = {}

    def download(model, **options):
        seen.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=download))
    assert resolve_model("owner/name", "modelscope") == tmp_path
    assert seen["model"] == "owner/name"

    def fail(model, **options):
        raise ConnectionError("unreachable")

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(ValueError, match=r"can't fetch 'owner/name' from ModelScope.*unreachable"):
        resolve_model("owner/name", "modelscope")
