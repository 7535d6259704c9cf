"""Command-line flags from dataclass fields: one definition for the parser, for keyword arguments and for the documentation;
and values as people write them: "12GiB", "32 GB", "512M"."""

from __future__ import annotations

import argparse
import dataclasses
import re
from dataclasses import field
from typing import Any

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of "12GiB" or "12G" (powers of 1024), "12GB" (powers of 1000), or a plain number of bytes.

    Raises ValueError naming `flag` for anything else, and for sizes that are zero or negative.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?\s*", text.upper())
    if match is None:
        raise ValueError(f"{flag} {text!r} is not a size: write for example 12GiB, 12GB or 12000M")
    number, letter, tail = match.groups()
    unit = _DECIMAL[letter + "B"] if letter and tail == "B" else _UNITS[letter]
    size = int(float(number) * unit)
    if size < 1:
        raise ValueError(f"{flag} {text!r} must be more than nothing: write for example 12GiB")
    return size


def flag(default: Any, help: str, *, names: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> Any:
    """A field that is also a command-line flag. names: its flags, the first one documented; default --field-name."""
    return field(default=default, metadata={"help": help, "flags": names, "choices": choices})


def iter_flags(cls: type) -> list[tuple[str, dataclasses.Field[Any]]]:
    """(group name, field) of every flag of a config tree, in order."""
    out = []
    for group in dataclasses.fields(cls):
        kind = group.default_factory
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            out += [(group.name, item) for item in dataclasses.fields(kind) if "help" in item.metadata]
    return out


def flag_names(item: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Command-line names of a field, the documented one first."""
    return tuple(item.metadata.get("flags") or ()) or ("--" + item.name.replace("_", "-"),)


def add_flags(parser: argparse.ArgumentParser, fields: list[dataclasses.Field[Any]], title: str) -> None:
    """Give a parser one flag a field. Absent flags stay absent from the namespace, so that explicit ones can be told."""
    group = parser.add_argument_group(title)
    for item in fields:
        names, choices = flag_names(item), item.metadata.get("choices") or None
        default = "" if item.default in (None, "", False) else f" (default {item.default})"
        text = (item.metadata["help"] + default).replace("%", "%%")
        common: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        if item.default is False:
            group.add_argument(*names, action="store_true", **common)
        else:
            group.add_argument(*names, type=_parser_of(str(item.type)), choices=choices, **common)


def _parser_of(annotation: str) -> Any:
    base = annotation.replace("| None", "").strip()
    if base.startswith(("tuple[str", "Sequence[str")):
        return lambda text: tuple(part.strip() for part in text.split(",") if part.strip())
    if base.startswith("tuple[int"):
        return _whole_numbers
    if base == "int" and base != annotation.strip():
        return lambda text: None if text == "auto" else int(text)  # as if it weren't given
    return {"int": int, "float": float, "str": str}[base]


def _whole_numbers(text: str) -> tuple[int, ...]:
    """3,17 -> (3, 17); argparse turns the ValueError of anything else into its message."""
    return tuple(int(part) for part in text.split(",") if part.strip())


def flag_table(groups: list[tuple[str, list[dataclasses.Field[Any]]]]) -> str:
    """Markdown table of flags, by group: the body of docs/flags.md."""
    lines = []
    for title, fields in groups:
        lines += [f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
        for item in fields:
            names = ", ".join(f"`{name}`" for name in flag_names(item))
            choices = item.metadata.get("choices")
            extra = f" ({', '.join(choices)})" if choices else ""
            lines.append(f"| {names} | `{item.default}` | {item.metadata['help']}{extra} |")
        lines.append("")
    return "\n".join(lines)
