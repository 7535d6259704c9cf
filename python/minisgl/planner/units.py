"""Sizes as people write them: "12GiB", "32 GB", "512M"."""

from __future__ import annotations

import re

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


def parse_count(value: int, flag: str) -> int:
    """`value`, or ValueError naming `flag` if it is below 1."""
    if value < 1:
        raise ValueError(f"{flag} {value} must be at least 1")
    return value


def gib(num_bytes: float) -> str:
    """Bytes for people, in GiB, or MiB below a tenth of one."""
    return (
        f"{num_bytes / 2**30:,.2f} GiB" if abs(num_bytes) >= 0.1 * 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
    )
