"""AllToAll: a token travels to the ranks that hold its experts, once each, and their partial sums travel back.

    own rows [C, D] --+--> routes to experts here -------------------------+
                      |                                                    +--> sum in the order of ranks, fp32 --> [C, D]
                      +--> rows for other ranks => computed there => back -+

A token is sent once a rank and not once a route: with K = 8 and 4 ranks that is 2.7 rows instead of 6. Its K ids and weights
travel as fp32 pairs in one more collective (ids are exact in fp32 below 2^24).

dynamic sends exactly the rows that are needed. How many is known only after routing: the counts are the one thing that the
host reads, and so no CUDA graph can hold it.
static sends buckets of C rows, the most that one rank can need, so nothing overflows and nothing is read on the host. Because
the shapes are fixed, packing a bucket would save nothing: every bucket is all of the own rows, which makes sending them one
all-gather. Rows that have no expert at their destination are rows of -1 there and cost no arithmetic.

Tokens may be replicated (tensor-parallel attention: all ranks have all T) or each rank's own (data-parallel attention).
Replicated token i belongs to rank i % N, and after the sum an all-gather gives all of them to everybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.moe.base import Routing
from minisgl.moe.exchange.base import Dispatched, Rows
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import Flight, Group


@dataclass(frozen=True)
class _Sent(Dispatched):
    """num_tokens T before padding. rows_C: which of the rows of all buckets [N * C] were sent, in order; None for all of
    them. sent, received: rows to and from each rank.
    """

    num_tokens: int
    num_own: int
    rows_R: torch.Tensor | None
    sent: list[int]
    received: list[int]


class AllToAll:
    """Expert parallelism by sending tokens.

    static: fixed buckets instead of exact counts. overlap: compute the routes to experts here while the others fly. That
    reads the weights twice, so it pays where arithmetic or the link is the limit (large batches) and not for small ones;
    without it own and received rows are one batch. replicated: whether all ranks are given the same tokens; if not, a static
    exchange must be given the same number on every rank.
    """

    def __init__(
        self,
        spread: ExpertSpread,
        group: Group,
        device: torch.device,
        *,
        static: bool,
        overlap: bool = True,
        replicated: bool = True,
    ) -> None:
        assert spread.num_ranks == group.size
        self.num_experts, self.num_local_experts = spread.num_experts, len(spread.experts_of(group.rank))
        self.graph_safe = static and group.graph_safe
        self._group, self._tables = group, spread.tables(group.rank, device)
        self._static, self._overlap, self._replicated = static, overlap, replicated

    def most_rows(self, num_tokens: int) -> int:
        own = -(-num_tokens // self._group.size) if self._replicated else num_tokens
        others = own * (self._group.size if self._static else self._group.size - 1)
        return max(own, others) if self._overlap else own + others

    # --- there -------------------------------------------------------------------------------------------------------

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        x_CD, ids_CK, weights_CK = self._own(x_TD, routing)
        meta_CM = torch.stack([ids_CK.float(), weights_CK], dim=-1).flatten(1)
        own, home_E1 = len(x_CD), self._tables.home_E1
        if self._static:
            rows_R, sent, received = None, [own] * self._group.size, [own] * self._group.size
            flights = self._group.start_gather(meta_CM), self._group.start_gather(x_CD)
        else:
            rows_R, sent, received = self._counts(ids_CK)
            token_R = rows_R % max(own, 1)
            flights = (
                self._group.start_exchange(meta_CM[token_R], sent, received),
                self._group.start_exchange(x_CD[token_R], sent, received),
            )
        at_home = Rows(x_CD, Routing(home_E1[ids_CK], weights_CK))
        parts = self._parts(at_home, *flights)
        return _Sent(parts, x_TD.shape[0], own, rows_R, sent, received)

    def _own(self, x_TD: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of which this rank is the origin, padded with rows of no expert to the number that every rank has."""
        if not self._replicated:
            return x_TD, routing.ids_TK, routing.weights_TK
        group, missing = self._group, -len(x_TD) % self._group.size
        x_TD = F.pad(x_TD, (0, 0, 0, missing))
        ids_TK = F.pad(routing.ids_TK, (0, 0, 0, missing), value=-1)
        weights_TK = F.pad(routing.weights_TK, (0, 0, 0, missing))
        return tuple(t[group.rank :: group.size].contiguous() for t in (x_TD, ids_TK, weights_TK))  # type: ignore[return-value]

    def _counts(self, ids_CK: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """(which of N buckets of C rows to send, row numbers in order; rows to each rank; rows from each rank)."""
        group = self._group
        ranks_N = torch.arange(group.size, device=ids_CK.device)
        needed_NC = (self._tables.target_E1[ids_CK] == ranks_N[:, None, None]).any(dim=-1)
        needed_NC[group.rank] = False
        counts_N = needed_NC.sum(dim=1)
        one = [1] * group.size
        back_N = group.start_exchange(counts_N, one, one).wait()
        sent, received = torch.stack([counts_N, back_N]).tolist()  # the one read on the host
        # a stable sort puts the needed rows first, in order; nonzero() would be a second read
        order = needed_NC.flatten().to(torch.uint8).argsort(descending=True, stable=True)
        return order[: sum(sent)], sent, received

    def _parts(self, at_home: Rows, meta: Flight, x: Flight) -> Iterator[Rows]:
        if self._overlap:
            yield at_home
            yield self._arrived(meta, x)
        else:
            other = self._arrived(meta, x)
            pairs = zip(
                (at_home.x_RD, at_home.routing.ids_TK, at_home.routing.weights_TK),
                (other.x_RD, other.routing.ids_TK, other.routing.weights_TK),
            )
            x_RD, ids_RK, weights_RK = (torch.cat(pair) for pair in pairs)
            yield Rows(x_RD, Routing(ids_RK, weights_RK))

    def _arrived(self, meta: Flight, x: Flight) -> Rows:
        """Rows of other ranks; their replicated experts were computed where they came from."""
        ids_RK, weights_RK = meta.wait().unflatten(1, (-1, 2)).unbind(-1)
        local_RK = self._tables.owned_E1[ids_RK.long()]
        if self._static:
            group = self._group
            mine = torch.arange(len(local_RK), device=local_RK.device) // max(len(local_RK) // group.size, 1)
            local_RK = local_RK.masked_fill((mine == group.rank)[:, None], -1)
        return Rows(x.wait(), Routing(local_RK, weights_RK.contiguous()))

    # --- and back ----------------------------------------------------------------------------------------------------

    def combine(self, ys: Sequence[torch.Tensor], sent: Dispatched) -> torch.Tensor:
        assert isinstance(sent, _Sent)
        own = sent.num_own
        home_CD, other_RD = ys if self._overlap else (ys[0][:own], ys[0][own:])
        back_RD = self._group.start_exchange(other_RD, sent.received, sent.sent).wait()
        if sent.rows_R is not None:
            rows_R, packed_RD = sent.rows_R, back_RD
            back_RD = packed_RD.new_zeros((self._group.size * own, packed_RD.shape[1]))
            back_RD[rows_R] = packed_RD
        back_NCD = back_RD.unflatten(0, (self._group.size, own))
        y_CD = torch.zeros_like(home_CD, dtype=torch.float32)
        for rank in range(self._group.size):  # in the order of ranks: the sum has one meaning
            y_CD += (home_CD if rank == self._group.rank else back_NCD[rank]).float()
        y_CD = y_CD.to(home_CD.dtype)
        if not self._replicated:
            return y_CD
        y_NCD = self._group.all_gather(y_CD[None])
        return y_NCD.transpose(0, 1).flatten(0, 1)[: sent.num_tokens]
