"""What BLOCK_K is worth: the whole layer with the tuned tiles, but for BLOCK_K and the stages that fit with it.

    python benchmark/moe_block_k.py --token-counts 256,4096 --formats none,fp8 --block-ks 32,64,128

For every BLOCK_K all numbers of stages that fit the shared memory are measured and the fastest is kept, so a narrow step is
not blamed for a short pipeline. Appends a record to benchmark/results/moe.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import moe_cases
from minisgl.moe.base import Problem
from minisgl.moe.candidates import grouped_shared_bytes
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.select import Choice, DeviceLimits, Tiles
from record import append_record

MOST_STAGES = 8


def with_block_k(
    problem: Problem, limits: DeviceLimits, choice: Choice, block_k: int
) -> Iterator[tuple[int, Choice]]:
    """(stages of gate_up, choice) for all stages that fit."""

    def fitted(tiles: Tiles, halves: int, most: int) -> Tiles | None:
        for stages in range(most, 1, -1):
            changed = replace(tiles, block_k=block_k, num_stages=stages)
            used = grouped_shared_bytes(problem, changed, choice.block_m, halves)
            if used <= limits.shared_bytes - 1024:
                return changed
        return None

    for most in range(2, MOST_STAGES + 1):
        up, down = fitted(choice.gate_up, 2, most), fitted(choice.down, 1, most)
        if up is not None and down is not None:
            yield up.num_stages, replace(choice, gate_up=up, down=down)


def microseconds(case: moe_cases.LayerCase, choice: Choice) -> float:
    """Raises SystemExit where the result is wrong."""
    backend = FusedMoeBackend(records=lambda problem, limits: {problem.num_tokens: choice})
    error = moe_cases.layer_error(backend, case)
    if not error < get_format(case.problem.format).tolerance:
        raise SystemExit(f"{case.problem}, {choice}: error {error:.2e}")
    return moe_cases.time_graph(lambda i: moe_cases.run_layer(backend, case, i), len(case.slabs)).median


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--token-counts", default="4096")
    parser.add_argument("--formats", default="none,fp8")
    parser.add_argument("--block-ks", default="32,64,128")
    options = parser.parse_args()
    device, shape = torch.device("cuda"), moe_cases.SHAPES["qwen3-30b-a3b"]
    limits, results = DeviceLimits.of(device), []
    for name in options.formats.split(","):
        first = moe_cases.make_slab(shape, name, 128, True, device, seed=0)
        slabs = [first, moe_cases.other_slab(first, 1), moe_cases.other_slab(first, 2)]
        for num_tokens in (int(count) for count in options.token_counts.split(",")):
            case = moe_cases.make_case(shape, num_tokens, slabs, "random", 0, 1)
            tuned = FusedMoeBackend().choose(case.problem, device)
            for block_k in (int(width) for width in options.block_ks.split(",")):
                found = {}
                for _, choice in with_block_k(case.problem, limits, tuned, block_k):
                    if choice not in found:
                        found[choice] = microseconds(case, choice)
                best = min(found, key=lambda choice: found[choice])
                stages = best.gate_up.num_stages, best.down.num_stages
                print(
                    f"{name} T={num_tokens} BLOCK_K={block_k}: {found[best]:.1f} us, stages {stages}",
                    flush=True,
                )
                results.append(
                    {
                        "format": case.problem.format,
                        "num_tokens": num_tokens,
                        "block_k": block_k,
                        "us": round(found[best], 1),
                        "stages": stages,
                    }
                )
    record = {"case": "moe layer, qwen3-30b-a3b, random, by BLOCK_K", "results": results}
    append_record("moe", record)
    print("MOE_BLOCK_K_RESULT=" + json.dumps(record))


if __name__ == "__main__":
    main()
