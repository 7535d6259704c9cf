"""Which experts, and which part of each, the store of one rank holds.

Expert parallelism gives every expert an owner; plain tensor parallelism gives every rank a part of every expert's hidden dim F.
A store knows neither: it numbers its experts 0, 1, 2 … and has an F of its own. This is the map between the two, for the
loader (global expert and whole tensor -> local number and slice) and for the exchange (global ids -> local ids).

    8 experts, 2 ranks   contiguous    rank 0: 0 1 2 3    rank 1: 4 5 6 7
                         round-robin   rank 0: 0 2 4 6    rank 1: 1 3 5 7
                         … and expert 3 replicated: rank 0: 0 2 3 4 6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from minisgl.parallel import Shard

SpreadKind = Literal["contiguous", "round-robin"]


@dataclass(frozen=True)
class ExpertShard:
    """What one rank's store holds: global numbers of its experts in local order, and its part of F.

    adds_down_bias: whether this rank's `down` carries its bias. Where F is shared between ranks their sums are added up, so
    exactly one of them may.
    """

    num_experts: int
    experts: tuple[int, ...]
    hidden: Shard
    adds_down_bias: bool = True

    @classmethod
    def whole(cls, num_experts: int, hidden_dim: int) -> ExpertShard:
        """One rank with everything."""
        return cls(num_experts, tuple(range(num_experts)), Shard(hidden_dim))

    def local(self, expert: int) -> int:
        """The store's number of a global expert that it holds; a number that no rank has stays itself, to be refused there."""
        return self.experts.index(expert) if expert in self.experts else expert

    def is_elsewhere(self, expert: int) -> bool:
        """Whether a global expert exists and other ranks hold it."""
        return expert < self.num_experts and expert not in self.experts

    def cut(self, part: str) -> Cut | None:
        """How one expert's checkpoint tensor is cut to this rank's part; None where all of it is kept.

        part: "gate", "up", "gate_up", "down", or one of these with "_bias".
        """
        start, stop, total = self.hidden.start, self.hidden.stop, self.hidden.total
        if self.hidden.length == total or part == "down_bias":
            return None
        if part.startswith("gate_up"):  # a piece of each half
            return Cut(0, 2 * total, ((start, stop), (total + start, total + stop)))
        return Cut(1 if part == "down" else 0, total, ((start, stop),))


@dataclass(frozen=True)
class Cut:
    """Ranges of dim `dim`, which has `total` elements in the checkpoint, to be put side by side."""

    dim: int
    total: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ExpertSpread:
    """Which rank owns which expert, and which experts every rank holds.

    kind: "contiguous" gives each rank a run of neighbours, "round-robin" every size-th expert. replicated: held by all ranks;
    a route to one is computed where its token comes from. Raises ValueError, with the remedy, for what can't be spread.
    """

    num_experts: int
    num_ranks: int
    kind: SpreadKind = "contiguous"
    replicated: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"--expert-parallel-size={self.num_ranks} does not divide the model's {self.num_experts} experts"
            )
        wrong = [e for e in self.replicated if not 0 <= e < self.num_experts]
        if wrong:
            raise ValueError(
                f"--moe-replicated-experts names expert {wrong[0]}, but there are 0..{self.num_experts - 1}"
            )
        if len(set(self.replicated)) != len(self.replicated):
            raise ValueError(f"--moe-replicated-experts={self.replicated} names an expert twice")

    def owner(self, expert: int) -> int:
        """The rank that holds an expert, replicated or not."""
        per_rank = self.num_experts // self.num_ranks
        return expert // per_rank if self.kind == "contiguous" else expert % self.num_ranks

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Global numbers of a rank's experts, in the order of its local ones."""
        everywhere = set(self.replicated)
        return tuple(e for e in range(self.num_experts) if e in everywhere or self.owner(e) == rank)

    def shard(self, rank: int, hidden_dim: int) -> ExpertShard:
        """What the store of a rank holds."""
        return ExpertShard(self.num_experts, self.experts_of(rank), Shard(hidden_dim))

    def tables(self, rank: int, device: torch.device) -> SpreadTables:
        """The maps that a rank's exchange reads on the device."""
        owned, home, target = ([-1] * (self.num_experts + 1) for _ in range(3))
        for local, expert in enumerate(self.experts_of(rank)):
            home[expert] = local
            if expert not in self.replicated:
                owned[expert] = local
        for expert in set(range(self.num_experts)) - set(self.replicated):
            target[expert] = self.owner(expert)
        maps = torch.tensor([owned, home, target], dtype=torch.int32, device=device)
        return SpreadTables(*maps.unbind())


@dataclass(frozen=True)
class SpreadTables:
    """int32 [E + 1] each, by global expert; entry E, which is also entry -1, stands for "no expert" and is -1.

    owned_E1: local id of an expert that only this rank holds. home_E1: local id of any expert this rank holds, for tokens
    whose origin it is. target_E1: the rank a route has to travel to, -1 if the expert is everywhere.
    """

    owned_E1: torch.Tensor
    home_E1: torch.Tensor
    target_E1: torch.Tensor
