"""What a plan may recommend. It shows more than that, so that a person sees what a feature would bring; a set-up that needs one
that is absent, or whose speed and memory no GPU has confirmed yet, is marked with the reason and never recommended.

When a feature is ready, its `available` becomes True here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """available: whether a plan may recommend it. reason: what to say while it may not."""

    available: bool
    reason: str


FEATURES: dict[str, Feature] = {
    "expert-offload": Feature(True, "no experts in host memory in this version"),
    "tensor-parallel": Feature(True, "no --tp in this version"),
    "expert-parallel": Feature(True, "no --expert-parallel-size in this version"),
    "quantized-checkpoint": Feature(True, "no quantized checkpoints in this version"),
}


def lacking(names: frozenset[str]) -> list[str]:
    """Reasons why something that needs these features is not recommended; empty if it may be."""
    return [FEATURES[name].reason for name in sorted(names) if not FEATURES[name].available]
