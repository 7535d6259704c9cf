"""The GPU tier and the benchmarks find what they import: they run on machines with a GPU alone, and there a renamed function
would cost a whole run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = """
import importlib.util, sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
for name in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("tier", name)
    sys.modules["tier"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


@pytest.mark.parametrize("folder", ["tests/gpu", "benchmark"])
def test_modules_for_gpus_import_without_one(folder: str) -> None:
    pytest.importorskip("triton", reason="the GPU tier needs Triton")
    files = [str(path) for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "__init__.py"]
    assert files
    code = f"import sys; sys.path[:0] = ['{ROOT}', '{ROOT}/benchmark']\n{IMPORT}"
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
