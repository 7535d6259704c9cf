"""Records that an "auto" goes by: one JSON file of entries by key, written by a benchmark and shipped with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_entries(path: Path) -> dict[str, Any]:
    """Entries by key; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def add_entry(path: Path, key: str, entry: Any) -> None:
    """Add an entry, or replace the one of this key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**read_entries(path), key: entry}
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
