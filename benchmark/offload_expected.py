"""What the caches of `offload.py` must fetch: the definition in `moe/store/planning.py`, run on the routing that was forced."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from minisgl.moe.store.device_cache import WARM_TOKENS
from minisgl.moe.store.planning import EMPTY, SlotTable, graph_holds, place_step

TOLERANCE = 0.05  # caches begin with what a prompt left, and so choose other victims among equals: up to 2 % of the bytes


def expected_misses(
    ids_NLTK: np.ndarray, num_experts: int, num_slots: int, mode: str, wave_size: int = 8
) -> np.ndarray:
    """[steps, layers]: experts fetched by decode steps with this routing. wave_size: of staged mode."""
    tables = [SlotTable(num_experts, num_slots) for _ in range(ids_NLTK.shape[1])]
    planned = graph_holds(ids_NLTK.shape[2], ids_NLTK.shape[3], num_experts, num_slots)
    misses = np.zeros(ids_NLTK.shape[:2], dtype=np.int64)
    for step, ids_LTK in enumerate(ids_NLTK):
        for layer, table in enumerate(tables):
            if mode == "staged":
                misses[step, layer] = _staged(table, ids_LTK[layer], step * len(ids_LTK[layer]), wave_size)
            elif planned:
                waves = place_step(table, _counted(ids_LTK[layer]), step + 1)
                misses[step, layer] = sum(len(wave.loads) for wave in waves)
            else:
                misses[step, layer] = _streamed(table, ids_LTK[layer], step + 1)
    return misses


def check_bytes(row: dict[str, Any]) -> None:
    """Raises SystemExit for a decode row whose caches fetched something else than the definition says: it's no measurement."""
    fetched, expected = row["bytes"], row["expected_bytes"]
    if abs(fetched - expected) > TOLERANCE * expected:
        case = f"{row['format']}, {row['slots']} slots, {row['routing']}"
        raise SystemExit(
            f"{case}: fetched {fetched:.3e} B a step, the definition says {expected:.3e}. The routing that was measured isn't "
            "the one that was forced, or the cache keeps the wrong experts; this row is not recorded."
        )


def _counted(ids_TK: np.ndarray) -> Counter[int]:
    return Counter(ids_TK.reshape(-1).tolist())


def _streamed(table: SlotTable, ids_TK: np.ndarray, now: int) -> int:
    """A step that no graph holds, as a prompt: what it lacks passes by, and what its last tokens use enters the cache."""
    absent = sum(table.slot_of_E[expert] == EMPTY for expert in _counted(ids_TK))
    kept = max(1, min(WARM_TOKENS, table.num_slots // (2 * ids_TK.shape[1])))
    place_step(table, _counted(ids_TK[-kept:]), now)
    return absent


def _staged(table: SlotTable, ids_TK: np.ndarray, before: int, wave_size: int) -> int:
    """Time counts tokens, and the next wave may not take the slots of the one that computes, if there are others."""
    last = {expert: token for token, ids_K in enumerate(ids_TK.tolist()) for expert in ids_K}
    counts = _counted(ids_TK)
    order = sorted(last, key=lambda expert: (last[expert], expert))
    for expert in order:
        table.use(expert, before + last[expert], counts[expert])
    current = [expert for expert in order if table.slot_of_E[expert] != EMPTY]
    misses = [expert for expert in order if table.slot_of_E[expert] == EMPTY]
    wave_size = min(wave_size, table.num_slots)
    for start in range(0, len(misses), wave_size):
        wave = misses[start : start + wave_size]
        held = [table.slot_of_E[expert] for expert in current]
        table.fill(wave, held if len(held) + len(wave) <= table.num_slots else ())
        current = wave
    return len(misses)
