"""minisgl: a compact inference engine for Mixture-of-Experts models.

    from minisgl import LLM, SamplingParams

`LLM` is imported when it is first asked for: whoever needs one subsystem only (a kernel, the planner) does not load them all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.core import RequestOutput, SamplingParams
    from minisgl.llm import LLM

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"

_HOME = {"LLM": "minisgl.llm", "RequestOutput": "minisgl.core", "SamplingParams": "minisgl.core"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
