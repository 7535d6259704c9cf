"""Learning online which eviction policy suits the traffic: regret from a list of what was evicted and wanted again.

Each expert (a score function) names its own victim; one expert, drawn by weight, decides. What is evicted is remembered in a
bounded ghost list together with the experts that would have evicted it too. When a request asks for a remembered page, that
eviction was a mistake, and those experts lose weight in proportion to what computing the page again costs.

The idea is LeCaR's (Vietri et al., 2018). What differs, each because the plain rule ended on the wrong expert or on a mixture:
- The penalty is divided by the probability that this page went (as in Exp3, Auer et al., 2002). Otherwise an expert that is
  rarely drawn is rarely blamed, and weights settle where probability times mistakes is equal, not where mistakes are few.
- It is divided by the pages that went with the same choice. Experts that like long leaves make fewer, larger choices; what
  counts is mistakes a page.
- It shrinks with age: 1 / (1 + pages evicted since / pages held). To have kept the page, its place would have been missing to
  others all that time, so a page wanted late is hardly a mistake.
- Experts that named the same victim share the blame. Where all agree, no weight moves.
- Log-weights may fall `RESERVE` behind the best, while every expert keeps `EXPLORE` of the draws: chance alone does not bring a
  bad expert back, a change of traffic does.
- A page that comes back brings along the history it was evicted with, as LRU-K retains it. Otherwise one choice of a bad expert
  also blinds the good ones: what was used a hundred times would look new to lfu. It is why adaptive can beat all its experts.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from minisgl.eviction import Entry, History

RESERVE = 10.0
EXPLORE = 0.003
COST_MEMORY = 0.01  # weight of the newest cost in the running mean that penalties are measured against


class Ghost(NamedTuple):
    """One evicted page. blame: experts that named it, none once that was regretted; probability: that one of them was drawn.
    num_pages: pages that went with that choice. serial: pages evicted before it.
    """

    entry: Entry
    blame: tuple[int, ...]
    probability: float
    num_pages: int
    serial: int


class GhostList:
    """The last `capacity` evicted pages, by fingerprint; the oldest is forgotten first."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1
        self.capacity = capacity
        self._ghosts: OrderedDict[Hashable, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def put(self, key: Hashable, ghost: Ghost) -> None:
        self._ghosts[key] = ghost
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > self.capacity:
            self._ghosts.popitem(last=False)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._ghosts

    def regret(self, key: Hashable) -> Ghost | None:
        """The ghost that somebody wants; None if there is none, or for a second time: each eviction is regretted once."""
        ghost = self._ghosts.get(key)
        if ghost is None or not ghost.blame:
            return None
        self._ghosts[key] = ghost._replace(blame=())
        return ghost

    def revive(self, key: Hashable) -> History | None:
        """The page is held again: its history from before, None if that is not known (any more)."""
        ghost = self._ghosts.pop(key, None)
        return None if ghost is None else ghost.entry.history


class Learner:
    """Weights over experts, which add up to 1. Deterministic for a seed and a sequence of calls."""

    def __init__(self, num_experts: int, learning_rate: float, seed: int) -> None:
        assert num_experts >= 1
        assert learning_rate > 0
        self.learning_rate = learning_rate
        self._random = random.Random(seed)
        self._log_weights = [0.0] * num_experts  # the best one's is 0
        self._mean_cost: float | None = None
        self.weights: tuple[float, ...] = ()
        self._normalise()

    def draw(self) -> int:
        """An expert's number, by weight."""
        return self._random.choices(range(len(self.weights)), self.weights)[0]

    def probability(self, experts: Sequence[int]) -> float:
        """That one of these experts is drawn."""
        return sum(self.weights[expert] for expert in experts)

    def penalise(self, ghost: Ghost, age: float) -> None:
        """A request wanted the ghost. age: pages evicted since, as a multiple of the pages held."""
        cost, mean = ghost.entry.cost, self._mean_cost
        self._mean_cost = cost if mean is None else mean + COST_MEMORY * (cost - mean)
        if len(ghost.blame) == len(self.weights):
            return
        loss = cost / self._mean_cost / (ghost.probability * ghost.num_pages * (1.0 + age))
        for expert in ghost.blame:
            self._log_weights[expert] -= self.learning_rate * loss
        self._normalise()

    def _normalise(self) -> None:
        best = max(self._log_weights)
        self._log_weights = [max(weight - best, -RESERVE) for weight in self._log_weights]
        exponentials = [math.exp(weight) for weight in self._log_weights]
        share = (1.0 - EXPLORE * len(exponentials)) / sum(exponentials)
        self.weights = tuple(EXPLORE + share * exponential for exponential in exponentials)
