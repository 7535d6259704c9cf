"""Routing to measure expert caches with: which experts each token of each layer uses, by a model of how local it is.

random      every expert alike: the worst case
local       LRU stack distances of Qwen3-30B-A3B on text: an LRU cache of S slots hits LOCAL_CDF(S) of the picks
hits=P@S    an LRU cache of S slots hits P of the picks, uniformly within and without
FILE.npz    a recorded trace, repeated as often as needed (`--moe-trace` and benchmark/routing/trace.py write them)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

LOCAL_CDF = ((0, 0.0), (8, 0.366), (24, 0.741), (49, 0.894), (81, 0.962), (128, 1.0))
"""(slots, share of picks that an LRU cache of so many slots holds) of Qwen3-30B-A3B on real text, 128 experts a layer."""


def make_routing(
    kind: str, num_tokens: int, num_layers: int, num_experts: int, top_k: int, seed: int = 0
) -> np.ndarray:
    """int32 [tokens, layers, K], distinct within a token.

    Raises ValueError for a kind that isn't known and for a trace that doesn't fit.
    """
    rng = np.random.default_rng(seed)
    if kind == "random":
        order = np.argsort(rng.random((num_tokens, num_layers, num_experts)), axis=2)
        return order[..., :top_k].astype(np.int32)
    if kind == "local":
        slots, shares = zip(*LOCAL_CDF)
        scale = num_experts / slots[-1]
        points = [(s * scale, share) for s, share in zip(slots, shares)]
    elif kind.startswith("hits="):
        share, at = kind.removeprefix("hits=").split("@")
        points = [(0, 0.0), (float(at), float(share)), (num_experts, 1.0)]
    else:
        return _recorded(Path(kind), num_tokens, num_layers, num_experts, top_k)
    layers = [_by_distance(rng, points, num_tokens, num_experts, top_k) for _ in range(num_layers)]
    return np.stack(layers, axis=1)


def _by_distance(
    rng: np.random.Generator, points: list[tuple[float, float]], num_tokens: int, num_experts: int, top_k: int
) -> np.ndarray:
    """One layer: each pick's distance in the LRU stack is drawn from the piecewise linear distribution through `points`."""
    sizes, shares = (np.array(column) for column in zip(*points))
    stack, out = list(rng.permutation(num_experts)), np.empty((num_tokens, top_k), dtype=np.int32)
    for token in range(num_tokens):
        picks: list[int] = []
        while len(picks) < top_k:
            distance = min(int(np.interp(rng.random(), shares, sizes)), num_experts - 1)
            if stack[distance] not in picks:
                picks.append(stack[distance])
        out[token] = picks
        stack = picks + [expert for expert in stack if expert not in picks]
    return out


def _recorded(path: Path, num_tokens: int, num_layers: int, num_experts: int, top_k: int) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"routing {str(path)!r} is neither random, local, hits=P@S nor a file")
    trace = np.load(path)
    ids, experts = trace["ids"], int(trace["num_experts"])
    if (experts, ids.shape[2]) != (num_experts, top_k):
        raise ValueError(
            f"{path} has {experts} experts and top-{ids.shape[2]}, not {num_experts} and top-{top_k}"
        )
    layers = np.arange(num_layers) % ids.shape[1]
    tokens = np.arange(num_tokens) % ids.shape[0]
    return ids[tokens][:, layers].astype(np.int32)
