"""Numbers for people, and from them."""

from __future__ import annotations


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
