"""What runs next: pure functions from counts to counts.

Policy: every running request that decodes gets its one token; what is left of the token budget goes to prompts, first those
already running (in chunks), then waiting ones in order (priority, then arrival). A waiting request is never overtaken by a
later one of the same priority, so a long prompt cannot starve.

    budget 16   decode a | decode b | chunk of running prompt c (6) | first chunk of waiting prompt d (8)
"""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(num_uncomputed: Sequence[int], token_budget: int) -> list[int]:
    """Tokens of the next step for each running request, given how many each has left to compute (1: it decodes, 0: nothing).

    Decodes come first and are served even where they exceed the budget: stalling them would not make the step smaller than
    the batch that was admitted. Prompts share the rest in order.
    """
    left = token_budget - sum(1 for count in num_uncomputed if count == 1)
    shares = []
    for count in num_uncomputed:
        share = count if count <= 1 else max(0, min(count, left))
        if count > 1:
            left -= share
        shares.append(share)
    return shares


def may_admit(pages_missing: int, pages_available: int, num_running: int) -> bool:
    """Whether a waiting request should start: its whole prompt fits, and every running request could still take one page
    (without that reserve it would be preempted as soon as it is admitted). A lone request always may."""
    return num_running == 0 or pages_missing + num_running <= pages_available
