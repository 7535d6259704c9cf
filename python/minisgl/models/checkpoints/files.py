"""Safetensors by plain reads: every header of a checkpoint first, then tensors or parts of them, each into memory of its own.

A mapped file would count as this process's memory for as long as its pages stay, and a host with 32 GB could not tell a
57 GB checkpoint from a leak. Reads need no open file between calls, so any number of threads may read at once.

Layout of a file (the safetensors format): 8 bytes that give the length of the header, the header (JSON: name -> dtype, shape,
data_offsets), and the tensors back to back.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
OWN_MAPPING = 2**19  # bytes from which on a tensor has a mapping of its own
MAX_HEADER = 100_000_000  # bytes; the format's own limit
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Name in a file -> dtype."""


@dataclass(frozen=True)
class Header:
    """One tensor on disk: its file, name, shape, stored type (safetensors' name, e.g. "BF16"), and which bytes of the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    num_bytes: int = 0

    def row(self, index: int) -> Header:
        """Entry `index` of the leading dim, as a tensor of its own."""
        size = self.num_bytes // self.shape[0]
        return Header(self.file, self.name, self.shape[1:], self.dtype, self.start + index * size, size)


class Damaged(ValueError):
    """A file that is not what it says it is."""

    def __init__(self, file: Path, what: object) -> None:
        super().__init__(f"{file} is truncated or damaged ({what}): fetch it again")


def read_headers(folder: Path) -> list[Header]:
    """Every tensor of a checkpoint, from file headers alone. An index says which file holds which tensor.

    Raises ValueError, naming file and tensor, for a missing, truncated or damaged file, and for a tensor that two files hold.
    """
    if (folder / INDEX).is_file():
        wanted = _read_index(folder)
    else:
        files = sorted(folder.glob("*.safetensors"))
        single = folder / "model.safetensors"
        # Some repositories add the same weights once more as consolidated*.safetensors, under other names.
        files = [single] if single in files else [f for f in files if not f.name.startswith("consolidated")]
        if not files:
            raise ValueError(f"{folder} holds no *.safetensors: convert the model, or give another folder")
        wanted = dict.fromkeys(files)
    headers: dict[str, Header] = {}
    for file, names in wanted.items():
        present = {header.name: header for header in file_headers(file)}
        if names is not None and (absent := sorted(names - present.keys())):
            raise ValueError(
                f"{file} lacks {some(absent)}, which {INDEX} says it holds; fetch the model again"
            )
        for name in present if names is None else sorted(names):
            if name in headers:
                raise ValueError(
                    f"{name} is in {headers[name].file.name} and in {file.name} of {folder}: remove the file that does not "
                    f"belong to the model, or add {INDEX}"
                )
            headers[name] = present[name]
    return list(headers.values())


def file_headers(file: Path) -> list[Header]:
    """The tensors of one file, in the order of its header."""
    table, start, size = read_table(file)
    headers = []
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        try:
            first, last = entry["data_offsets"]
            header = Header(file, name, tuple(entry["shape"]), entry["dtype"], start + first, last - first)
            numbers = all(isinstance(n, int) and n >= 0 for n in (first, last, *header.shape))
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(file, f"entry of {name}: {error}") from error
        itemsize = DTYPES[header.dtype].itemsize if header.dtype in DTYPES else None
        if not numbers or (itemsize is not None and header.num_bytes != itemsize * math.prod(header.shape)):
            raise Damaged(file, f"{name} does not fit its own shape")
        if header.num_bytes < 0 or header.start + header.num_bytes > size:
            raise Damaged(file, f"{name} ends behind the end of the file")
        headers.append(header)
    return headers


def read_table(file: Path) -> tuple[dict[str, Any], int, int]:
    """(the header of a file as it stands, where its tensors start, the file's size)."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise Damaged(file, "it ends within its header")
            table = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: fetch the model again") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Damaged(file, f"its header is no JSON: {error}") from error
    except OSError as error:
        raise Damaged(file, error) from error
    if not isinstance(table, dict):
        raise Damaged(file, "its header is no table")
    return table, 8 + length, size


def _read_index(folder: Path) -> dict[Path, set[str] | None]:
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged ({error}): fetch the model again") from error
    wanted: dict[Path, set[str] | None] = {folder / file: set() for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        names = wanted[folder / file]
        assert names is not None
        names.add(name)
    return wanted


def read_into(file: Path, start: int, target_B: torch.Tensor) -> None:
    """Fill target_B, contiguous uint8 in host memory, with the bytes of `file` from `start` on."""
    assert target_B.dtype == torch.uint8
    view, done = memoryview(target_B.numpy()), 0  # type: ignore[arg-type]
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            while done < len(view):
                count = stream.readinto(view[done:])
                if not count:
                    raise Damaged(file, f"it ends at byte {start + done}")
                done += count
    except OSError as error:
        raise Damaged(file, error) from error


def read_tensor(header: Header) -> torch.Tensor:
    """All of a tensor, in host memory."""
    return TensorView(header)[()]


class TensorView:
    """A tensor on disk, read when it is indexed: the leading dim's range by one read, the others cut in memory."""

    def __init__(self, header: Header) -> None:
        self._header = header

    def get_shape(self) -> list[int]:
        return list(self._header.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        header = self._header
        shape, start, num_bytes = list(header.shape), header.start, header.num_bytes
        rest: tuple[Any, ...] = ()
        if index and shape and shape[0]:
            first, last, step = index[0].indices(shape[0])
            assert step == 1
            row = num_bytes // shape[0]
            shape[0] = max(last - first, 0)
            start, num_bytes, rest = start + first * row, shape[0] * row, index[1:]
        target_B = _new_memory(num_bytes)
        read_into(header.file, start, target_B)
        tensor = target_B.view(DTYPES[header.dtype]).view(shape)
        return tensor[(slice(None), *rest)] if rest else tensor


def _new_memory(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]. Large ones are mapped one by one, so that they go back to the system when they are dropped: what many
    threads allocate and free otherwise stays in as many arenas.
    """
    if num_bytes < OWN_MAPPING:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def some(names: list[str], limit: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
