"""How good the student is: bits per byte of text it never saw, beside trivial baselines, and how evenly its experts work.

Bits per byte is the yardstick because it does not depend on the tokenizer. The held-out file holds pieces divided by lines
with a single `%`; every piece is scored alone, after one end-of-text token, and fits the context window.
"""

from __future__ import annotations

import bz2
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

#: tokens [1, S] -> logits [1, S, V]
LogitsOf = Callable[[torch.Tensor], torch.Tensor]


def read_pieces(path: Path) -> list[str]:
    """The pieces of a held-out file."""
    return [piece.strip() for piece in path.read_text(encoding="utf-8").split("\n%\n") if piece.strip()]


def model_bits(logits_of: LogitsOf, pieces: list[list[int]], end_of_text: int = 0) -> tuple[float, int]:
    """Bits that the model needs for all tokens of all pieces, and how many tokens those are."""
    bits, count = 0.0, 0
    for piece in pieces:
        tokens = torch.tensor([[end_of_text, *piece]])
        with torch.no_grad():
            logits = logits_of(tokens[:, :-1]).float().cpu()
        bits += F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item() / math.log(2)
        count += len(piece)
    return bits, count


def score_model(
    logits_of: LogitsOf, encode: Callable[[str], list[int]], pieces: list[str]
) -> dict[str, float]:
    """Bits per byte, perplexity a token, and tokens over all pieces."""
    bits, count = model_bits(logits_of, [encode(piece) for piece in pieces])
    num_bytes = sum(len(piece.encode()) for piece in pieces)
    return {
        "bits_per_byte": bits / num_bytes,
        "perplexity_per_token": 2 ** (bits / count),
        "tokens": count,
        "bytes": num_bytes,
    }


def bz2_bits_per_byte(pieces: list[str]) -> float:
    """What bz2 -9 needs for the pieces in one file."""
    data = "\n".join(pieces).encode()
    return 8 * len(bz2.compress(data, 9)) / len(data)


class ByteNgram:
    """An interpolated n-gram model of bytes with Witten-Bell smoothing, counted with sorted arrays.

    p_n(c | h) = (count(h c) + kinds(h) * p_{n-1}(c | h')) / (count(h) + kinds(h)), where kinds(h) is how many different bytes
    followed h and h' is h without its first byte (Witten and Bell, 1991); p_0 is uniform over 256 bytes.
    """

    def __init__(self, data: bytes, order: int = 5) -> None:
        self.order = order
        self.tables = []
        for length in range(1, order + 1):
            grams, counts = np.unique(_grams(data, length), return_counts=True)
            heads, first = np.unique(grams >> 8, return_index=True)
            totals = np.add.reduceat(counts, first)
            kinds = np.diff(np.append(first, len(grams)))
            self.tables.append((grams, counts, heads, totals, kinds))

    def bits_per_byte(self, pieces: Sequence[str]) -> float:
        """Mean bits a byte over all pieces, each scored alone."""
        bits, num_bytes = 0.0, 0
        for piece in pieces:
            data = piece.encode()
            probability = np.full(len(data), 1 / 256)
            for length, (grams, counts, heads, totals, kinds) in enumerate(self.tables, start=1):
                wanted = _grams(data, length)
                tail = probability[length - 1 :]
                count = _lookup(grams, counts, wanted)
                total, kind = _lookup(heads, totals, wanted >> 8), _lookup(heads, kinds, wanted >> 8)
                known = total > 0
                tail[known] = (count + kind * tail)[known] / (total + kind)[known]
            bits -= float(np.log2(probability).sum())
            num_bytes += len(data)
        return bits / num_bytes


def _grams(data: bytes, length: int) -> np.ndarray:
    """Every run of `length` bytes as one integer, the last byte lowest."""
    values = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    size = max(len(values) - length + 1, 0)
    grams = np.zeros(size, dtype=np.int64)
    for offset in range(length):
        grams = grams << 8 | values[offset : offset + size]
    return grams


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def routing_balance(counts: np.ndarray) -> list[dict[str, Any]]:
    """For each layer of counts [layers, E]: entropy of the experts' shares (1 is even), and the largest and smallest share.

    Shares are given as multiples of the even share 1 / E.
    """
    rows = []
    for layer, row in enumerate(counts):
        share = row / row.sum()
        entropy = -(share[share > 0] * np.log(share[share > 0])).sum() / math.log(len(row))
        rows.append(
            {
                "layer": layer,
                "entropy": float(entropy),
                "max": float(share.max() * len(row)),
                "min": float(share.min() * len(row)),
            }
        )
    return rows
