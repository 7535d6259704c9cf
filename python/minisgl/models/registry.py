"""From what a user calls a model to a local folder: a path, a bundled name, or the id of a hub that is fetched once.

Every failure ends as a ValueError that says what to do: this is the first thing most people meet.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from minisgl.models.download import download
from minisgl.models.smollm2 import ensure_smollm2

DEMO_FOLDER = Path(__file__).parents[1] / "assets" / "demo"
TEXT_PATTERNS = [
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
]  # configuration, tokenizer, chat template
WEIGHT_PATTERNS = ["*.safetensors"]
UNWANTED_PATTERNS = ["*/*", "consolidated*"]  # other formats in subfolders, and second copies of the weights


def resolve_model(
    model: str,
    source: str = "huggingface",
    revision: str | None = None,
    *,
    weights: bool = True,
    offline: bool = False,
) -> Path:
    """The local folder of a model.

    model: a folder (`~` is expanded), "demo", "smollm2", or a hub id such as "Qwen/Qwen3-30B-A3B". source: "huggingface" or
    "modelscope". revision: branch, tag or commit of a hub model. weights: False fetches configuration and tokenizer only.
    offline: take what earlier calls fetched, and never the network.
    Raises ValueError, with the remedy, for anything that is none of these or can't be fetched.
    """
    if model in _BUNDLED:
        return _BUNDLED[model]()
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"{model} is a file: give the folder that holds config.json and the weights")
    if not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", model):
        raise ValueError(
            f"no such folder: {model!r}; give a folder, one of {', '.join(_BUNDLED)}, or an id such as owner/name"
        )
    if source not in _HUBS:
        raise ValueError(f"unknown model source {source!r}: use one of {', '.join(_HUBS)}")
    patterns = TEXT_PATTERNS + (WEIGHT_PATTERNS if weights else [])
    return Path(_HUBS[source](model, revision, patterns, offline))


def _demo() -> Path:
    if not (DEMO_FOLDER / "config.json").is_file():
        raise ValueError("this installation has no bundled demo model: give a folder or a hub id instead")
    return DEMO_FOLDER


def _from_hugging_face(model: str, revision: str | None, patterns: list[str], offline: bool) -> str:
    try:
        return download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=UNWANTED_PATTERNS,
            local_files_only=offline,
        )
    except GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its terms on huggingface.co/{model}, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"Hugging Face has no model {model!r} and there is no such folder: check the spelling, or run "
            "`hf auth login` if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{model} has no revision {revision!r}: use a branch, tag or commit of it"
        ) from error
    except Exception as error:  # of the network, of which there are many kinds: all mean the same to the user
        if offline:
            raise ValueError(_not_cached(model, revision)) from error
        raise ValueError(
            f"can't fetch {model!r} from Hugging Face, and it is neither a folder nor in the cache: check the network (or "
            f"set HF_ENDPOINT to a mirror), or give a local folder. {_first_line(error)}"
        ) from error


def _from_modelscope(model: str, revision: str | None, patterns: list[str], offline: bool) -> str:
    try:
        modelscope = importlib.import_module("modelscope")  # an optional package that nothing else needs
    except ImportError as error:
        raise ValueError("models from ModelScope need its package: pip install modelscope") from error
    try:
        return modelscope.snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=UNWANTED_PATTERNS,
            local_files_only=offline,
        )
    except Exception as error:  # as above
        if offline:
            raise ValueError(_not_cached(model, revision)) from error
        raise ValueError(
            f"can't fetch {model!r} from ModelScope: check the id and the network, or give a local folder. "
            f"{_first_line(error)}"
        ) from error


def _not_cached(model: str, revision: str | None) -> str:
    at = f" at {revision}" if revision else ""
    return (
        f"--offline: {model}{at} is not in the cache, whole: leave out --offline once, or give a local folder"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"({type(error).__name__}: {text.splitlines()[0]})" if text else f"({type(error).__name__})"


_BUNDLED: dict[str, Callable[[], Path]] = {"demo": _demo, "smollm2": ensure_smollm2}
_HUBS: dict[str, Callable[[str, str | None, list[str], bool], str]] = {
    "huggingface": _from_hugging_face,
    "modelscope": _from_modelscope,
}
