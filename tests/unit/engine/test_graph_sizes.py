"""Which decode steps a CUDA graph can hold: every part is asked, and the store about the rows that it will place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from minisgl.engine.graphs import graph_sizes, safe_sizes


@dataclass
class Part:
    graph_safe: bool = True


@dataclass
class Store:
    """Safe up to so many rows, as a cache is whose waves are limited."""

    limit: int

    def graph_safe(self, num_tokens: int) -> bool:
        return num_tokens <= self.limit


@dataclass
class Padding(Part):
    """An exchange that hands over a row more for every two."""

    def most_rows(self, num_tokens: int) -> int:
        return num_tokens + -(-num_tokens // 2)


@dataclass
class Layer:
    store: Store
    exchange: Padding
    backend: Part


def test_a_store_is_asked_about_the_rows_it_will_place() -> None:
    layers: Any = [Layer(Store(100), Padding(), Part()), Layer(Store(64), Padding(), Part())]
    assert safe_sizes(graph_sizes(64), layers, [Part()]) == [1, 2, 4, 8, 16, 24, 32, 40]


@pytest.mark.parametrize("which", ["backend", "exchange", "other"])
def test_one_part_that_a_graph_cannot_hold_rules_out_all(which: str) -> None:
    layers: Any = [Layer(Store(64), Padding(which != "exchange"), Part(which != "backend"))]
    assert safe_sizes([1, 2], layers, [Part(which != "other")]) == []
