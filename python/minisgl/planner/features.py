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
    "expert-offload": Feature(False, "--moe-expert-offload was not measured on a GPU yet"),
    "tensor-parallel": Feature(False, "--tp was not run on several GPUs yet"),
    "expert-parallel": Feature(False, "--expert-parallel-size was not run on several GPUs yet"),
    "quantized-checkpoint": Feature(True, "no quantized checkpoints in this version"),
}


def lacking(names: frozenset[str]) -> list[str]:
    """Reasons why something that needs these features is not recommended; empty if it may be."""
    return [FEATURES[name].reason for name in sorted(names) if not FEATURES[name].available]
