"""The tutorial runs as a reader runs it, and prints the numbers it is known for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXPECTED = [
    "routing [[4, 3], [6, 1], [1, 7], [6, 4], [5, 4]]",
    "weights [[0.692, 0.308], [0.545, 0.455], [0.93, 0.07], [0.711, 0.289], [0.809, 0.191]]",
    "sorted ids    [3, 4, 10, 10, 1, 10, 10, 10, 0, 7, 9, 10, 8, 10, 10, 10, 2, 6, 10, 10, 5, 10, 10, 10]",
    "block experts [1, 3, 4, 5, 6, 7]",
    "37 tokens: fused against reference",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed")
def test_walkthrough() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "examples/moe_walkthrough.py"]
    result = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in EXPECTED:
        assert line in result.stdout
