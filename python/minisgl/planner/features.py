"""What this version can run. A plan shows more than that, so that a person sees what a feature would bring; a set-up that needs
one that is absent is marked with the reason and never recommended.

When a feature arrives, its `available` becomes True here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """available: whether this version has it. reason: what to say while it hasn't."""

    available: bool
    reason: str


FEATURES: dict[str, Feature] = {
    "expert-offload": Feature(False, "no expert cache in this version"),
    "tensor-parallel": Feature(False, "one GPU only in this version"),
    "expert-parallel": Feature(False, "no expert parallelism in this version"),
    "quantized-checkpoint": Feature(True, "no quantized checkpoints in this version"),
}


def lacking(names: frozenset[str]) -> list[str]:
    """Reasons why this version can't run something that needs these features; empty if it can."""
    return [FEATURES[name].reason for name in sorted(names) if not FEATURES[name].available]
