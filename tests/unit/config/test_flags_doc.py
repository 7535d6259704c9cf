"""docs/flags.md says what the code does."""

from __future__ import annotations

from tools import flags


def test_the_table_of_flags_is_up_to_date() -> None:
    assert flags.TARGET.read_text(encoding="utf-8") == flags.render(), "run: python tools/flags.py"
