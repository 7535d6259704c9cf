"""Kernels run in Triton's interpreter here. The variable counts only if it is set before triton is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
