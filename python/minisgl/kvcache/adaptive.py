"""Learning online which eviction policy suits the traffic: regret from a list of what was evicted and wanted
again.

Each expert (a score function) names its own victim; one expert, drawn by weight, decides. What is evicted is
remembered in a bounded ghost list together with the experts that would have evicted it too. When a request
asks for a remembered page, that eviction was a mistake, and those experts lose weight in proportion to what
computing the page again costs.

It differs from LeCaR (Vietri et al., 2018) in three points, each because the plain rule settles on a mixture
instead of the best expert:
- The penalty is divided by the probability that the eviction happened at all (as in Exp3). Otherwise an
  expert that is rarely drawn is rarely blamed, and its weight stays where it is.
- All experts that named the same victim share the blame. Where all agree, nobody's weight moves.
- Weights never fall below `FLOOR` of the best one, so that a phase change is noticed, and won back soon.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from minisgl.eviction import Entry

FLOOR = 0.01
_COST_MEMORY = 0.01  # weight of the newest cost in the running mean that penalties are measured against


class Ghost(NamedTuple):
    """One evicted page. blame: experts that named it; probability: of being evicted then, over the draw of
    the expert.
    """

    entry: Entry
    blame: tuple[int, ...]
    probability: float


class GhostList:
    """The last `capacity` evicted pages, by fingerprint; the oldest is forgotten first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ghosts: OrderedDict[Hashable, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def put(self, key: Hashable, ghost: Ghost) -> None:
        self._ghosts[key] = ghost
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > self.capacity:
            self._ghosts.popitem(last=False)

    def take(self, key: Hashable) -> Ghost | None:
        """The ghost, removed: each eviction is regretted once."""
        return self._ghosts.pop(key, None)


class Learner:
    """Weights over experts. Deterministic for a seed and a sequence of calls."""

    def __init__(self, num_experts: int, learning_rate: float, seed: int) -> None:
        assert num_experts >= 1
        assert learning_rate > 0
        self.learning_rate = learning_rate
        self._random = random.Random(seed)
        self._log_weights = [0.0] * num_experts  # of the best one: 0
        self._mean_cost: float | None = None
        self.weights: tuple[float, ...] = ()
        self._normalise()

    def draw(self) -> int:
        """An expert's number, by weight."""
        return self._random.choices(range(len(self.weights)), self.weights)[0]

    def probability(self, experts: Sequence[int]) -> float:
        return sum(self.weights[expert] for expert in experts)

    def penalise(self, blame: Sequence[int], probability: float, cost: float) -> None:
        """The experts in `blame` chose wrongly; `cost` is what that costs, `probability` how likely the
        choice was.
        """
        self._mean_cost = (
            cost if self._mean_cost is None else self._mean_cost + _COST_MEMORY * (cost - self._mean_cost)
        )
        if len(blame) == len(self.weights):
            return
        loss = cost / self._mean_cost / probability
        for expert in blame:
            self._log_weights[expert] -= self.learning_rate * loss
        self._normalise()

    def _normalise(self) -> None:
        best, lowest = max(self._log_weights), math.log(FLOOR)
        self._log_weights = [max(weight - best, lowest) for weight in self._log_weights]
        exponentials = [math.exp(weight) for weight in self._log_weights]
        self.weights = tuple(e / sum(exponentials) for e in exponentials)
