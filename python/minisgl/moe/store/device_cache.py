"""DeviceStore: experts in pinned host memory, S slots a layer on the device, planned and filled by the device itself.

    decode    place (one small kernel)    routed experts -> slots, list of the missing ones
              fetch, on a second stream   host memory -> slots, first what gate_up needs, then what down needs, while
              compute                     the routes whose experts were there run; the others follow, gate_up while down travels
              in turn                     where kernels wait for records themselves: one stream, one wave, see `store.overlap`
    prompt    experts that are in a slot at once; the others pass by, through transient slots: fetched as a decode step's are,
              or, where copies can be started ahead, by the copy engine, the next layer's behind them

A decode step never waits for the host, so a CUDA graph holds it, with as many waves as its tokens could need. Nor does a
short prompt (`prompts.passes`); a longer one waits for its routing once a layer. Neither fetches what no token uses. Both
leave the caches alone but for what their last tokens used: those experts are copied from the transient slots, because decoding
is about to ask for them.

With `prefetches` a layer that knows a guess (`expect`) hands it to the following layer's store, whose early slots are filled
behind the layer's own fetches for as long as the following layer has not begun; see `store.early`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from minisgl.moe.base import Arrival, ExpertShape, Placement, Routing, Slab
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store.base import CacheCounters, CacheView, Guess, StoreBytes
from minisgl.moe.store.device_plan import CHUNK_BYTES, DevicePlan
from minisgl.moe.store.early import MAX_EARLY_TOKENS, num_early_slots
from minisgl.moe.store.overlap import Overlap, Serial
from minisgl.moe.store.passing import plan_passing
from minisgl.moe.store.pinned import HostRecords
from minisgl.moe.store.planning import EMPTY, graph_holds
from minisgl.moe.store.prompts import STREAM_AHEAD, passes
from minisgl.moe.store.records import ExpertRecords
from minisgl.moe.store.routes import look, slots_of_waves
from minisgl.moe.store.streaming import TransientSlots

WARM_TOKENS = 4  # last tokens of a prompt whose experts are kept, if half of the slots hold them


class DeviceStore(ExpertRecords):
    """The records are the only copy of the weights; slots hold copies of some of them."""

    def __init__(
        self,
        host: HostRecords,
        shape: ExpertShape,
        weight_format: ExpertFormat,
        num_slots: int,
        top_k: int,
        device: torch.device | str,
        transient: Callable[[Slab], TransientSlots],
        overlap: Overlap | None = None,
    ) -> None:
        """host: memory for the records of all experts, all of it pinned where `device` is a CUDA device. top_k: experts a token
        uses at most. transient: given a slab like this layer's, the transient slots it shares with the other layers. overlap:
        None for `Serial`. As many parameters as ExpertOffload decides things; a bundle of them would have no other user.
        """
        num_experts = len(host.records_EB)
        super().__init__(num_experts, shape, weight_format, device, host.records_EB)
        assert 1 <= num_slots <= num_experts
        self.device = torch.device(device)
        assert self.device.type == "cpu" or host.num_pinned == num_experts, (
            "kernels can't read pageable memory"
        )
        self._host, self._top_k, self._overlap = host, top_k, overlap or Serial()
        early, nbytes = num_early_slots(num_experts, num_slots, self._overlap.prefetches), self.layout.nbytes
        slots_SB = torch.empty((num_slots + early, nbytes), dtype=torch.uint8, device=self.device)
        self.slab = Slab.of_records(weight_format.name, shape, self.layout, slots_SB)
        self.plan = DevicePlan(num_experts, num_slots, self.device, early, nbytes)
        self.following: DeviceStore | None = None  # the next layer's store, for streaming ahead
        self.num_streamed = 0
        self._guess: Guess | None = None
        self._first_of_down = min(part.offset for part in self.layout.parts if part.name.startswith("down"))
        self._fetches = (self._fetch_gate_up, self._fetch_down)
        self._transient = transient(self.slab)
        self._in_prompts = CacheCounters()

    @property
    def num_slots(self) -> int:
        return self.slab.num_slots

    def expect(self, guess: Guess) -> None:
        self._guess = guess

    def place(self, routing: Routing, awaits: bool = False, may_wait: bool = False) -> Iterable[Placement]:
        ids_TK = routing.ids_TK.contiguous()
        guess, self._guess = self._guess, None
        if self._overlap.prefetches:
            self._overlap.end()  # what a layer in turn has left open: its guess for this one
        many_waves = self.plan.num_waves(*ids_TK.shape) > 1
        if not self._is_planned(*ids_TK.shape) or (may_wait and many_waves):
            return (self._passing if self._passes(len(ids_TK)) else self._streaming)(ids_TK)
        if awaits and self._overlap.in_turn and self.plan.joins(*ids_TK.shape):
            return self._in_turn(ids_TK, guess if self._may_prefetch(len(ids_TK)) else None)
        return self._planned(ids_TK, guess if self._may_prefetch(len(ids_TK)) else None)

    def bytes(self) -> StoreBytes:
        pinned = self._host.pinned_bytes
        return StoreBytes(self.slab.records_SB.nbytes, pinned, self.records_EB.nbytes - pinned)

    def graph_safe(self, num_tokens: int) -> bool:
        return self._is_planned(num_tokens, self._top_k)

    def counters(self) -> CacheCounters:
        """Waits for the device."""
        hits, misses, evictions, *early = self.plan.counters.tolist()
        num_bytes = (misses + self.num_streamed) * self.layout.nbytes
        counters = CacheCounters(hits, misses, evictions, num_bytes) + self._in_prompts
        if not early:
            return counters
        _, copied, useful, _, _, off, saved = early
        came, used, left_out = (chunks * CHUNK_BYTES for chunks in (copied, useful, saved))
        return counters + CacheCounters(0, 0, 0, came - left_out, came, used, off)

    def view(self) -> CacheView:
        return CacheView(self.plan.uses_E, self.plan.slot_of_E != EMPTY)

    def _is_planned(self, num_tokens: int, top_k: int) -> bool:
        return graph_holds(num_tokens, top_k, self.num_experts, self.plan.num_slots)

    def _may_prefetch(self, num_tokens: int) -> bool:
        following = self.following
        return num_tokens <= MAX_EARLY_TOKENS and following is not None and following.plan.early.num_early > 0

    def _planned(self, ids_TK: torch.Tensor, guess: Guess | None) -> Iterator[Placement]:
        """Always the same launches for so many tokens, and no wait for the device."""
        num_waves = self.plan.num_waves(*ids_TK.shape)
        for wave in range(num_waves):
            with self.plan.promised():
                hit_slots_TK, miss_slots_TK = self.plan.place(ids_TK, first=wave == 0)
                self._overlap.begin(self._fetches)
            if guess is not None and self.following is not None and wave == num_waves - 1:
                self._overlap.follow(partial(self.following.plan_early, guess), self.following.fetch_early)
            try:
                if wave == 0:
                    yield Placement(self.slab, hit_slots_TK)
                self._overlap.join(1)
                yield Placement(self.slab, miss_slots_TK, before_down=self._join_all)
            finally:
                self._overlap.end()

    def _in_turn(self, ids_TK: torch.Tensor, guess: Guess | None) -> Iterator[Placement]:
        """One wave for all routes, launched behind the fetch it waits for. Three launches, each of which begins early. A guess
        is joined by the following layer; the last layer, which has none, joins what came early for itself.
        """
        prefetches, following = self._overlap.prefetches, self.following
        with self.plan.promised():
            slots_TK, _ = self.plan.place_jointly(ids_TK, ahead=True)
            if prefetches:  # its own fetch is on the main stream; the last layer needs something to join by
                self._overlap.begin(() if guess is not None else (_nothing,))
            chunks, programs = self.plan.fetch_in_turn(
                self.records_EB, self.slab.records_SB, self._first_of_down
            )
        if guess is not None and following is not None:
            self._overlap.follow(partial(following.plan_early, guess), following.fetch_early)
        arrival = Arrival(self.plan.told_3M, self.plan.arrived_S1, chunks, programs)
        try:
            yield Placement(self.slab, slots_TK, arrival=arrival)
        finally:
            if prefetches and guess is None:
                self._overlap.end()

    def plan_early(self, guess: Guess) -> None:
        """List what to fetch early for this layer."""
        self.plan.plan_early(guess().contiguous())

    def fetch_early(self) -> None:
        """Fetch what is listed, until this layer begins."""
        self.plan.fetch_early(self.records_EB, self.slab.records_SB)

    def _join_all(self) -> None:
        self._overlap.join(len(self._fetches))

    def _fetch_gate_up(self) -> None:
        self.plan.fetch(self.records_EB, self.slab.records_SB, end=self._first_of_down)

    def _fetch_down(self) -> None:
        begin, ahead = self._first_of_down, self._overlap.by_events
        self.plan.fetch(self.records_EB, self.slab.records_SB, begin, ahead=ahead)

    def _passes(self, num_tokens: int) -> bool:
        weights = 3 * self.shape.model_dim * self.shape.hidden_dim
        sizes = (self.num_experts, self.plan.num_slots, self._transient.slab.num_slots)
        return passes(num_tokens, self._top_k, weights, self.layout.nbytes, sizes)

    def _passing(self, ids_TK: torch.Tensor) -> Iterator[Placement]:
        """A short prompt: what `_streaming` does, planned and fetched by the device. Never waits, and sends nothing ahead."""
        plan, near, kept = self.plan, self._transient.slab, self._kept
        entering = False
        with self._transient.lent():
            passing = plan_passing(plan, ids_TK, min(kept, len(ids_TK)), near.num_slots)
            fetches = [
                partial(plan.fetch_passing, self.records_EB, near.records_SB, listed)
                for listed in passing.waves
            ]
            try:
                self._overlap.begin(fetches[:1])
                yield Placement(self.slab, passing.places_WTK[0])
                entering = True
                plan.place(ids_TK[-kept:], first=True, count=False)
                for index in range(len(fetches)):
                    if index:
                        self._overlap.begin((fetches[index],))
                    self._overlap.join(1)
                    if index * near.num_slots < kept * self._top_k:
                        plan.fetch_some(near.records_SB, passing.places_WE[1 + index], self.slab.records_SB)
                    yield Placement(near, passing.places_WTK[1 + index])
                entering = False
            finally:
                self._overlap.end()
                if entering:  # the maps promise experts that have not come yet
                    plan.fetch(self.records_EB, self.slab.records_SB)

    @property
    def _kept(self) -> int:
        """Last tokens of a prompt whose experts enter the cache."""
        return max(1, min(WARM_TOKENS, self.plan.num_slots // (2 * self._top_k)))

    def _streaming(self, ids_TK: torch.Tensor) -> Iterator[Placement]:
        """A prompt; waits for its routing."""
        following = () if self.following is None else (self.following.plan.slot_of_E,)
        kept = self._kept
        found = look(ids_TK, self.num_experts, kept, (*self.plan.where(), *following))
        place_of_E = self.plan.place_of_E(*found.state[:2])
        hits = {expert: place_of_E[expert] for expert in found.used if place_of_E[expert] != EMPTY}
        misses = [expert for expert in found.used if expert not in hits]
        self._in_prompts += CacheCounters(hits=len(hits), misses=len(misses))
        # Those to be kept come last, so that few waves are searched for them.
        waves = self._transient.plan(self, sorted(misses, key=lambda expert: (expert in found.last, expert)))
        slots_of = [hits, *(wave.slot_of for wave in waves)]
        slots_WE, slots_WR = slots_of_waves(found, slots_of, self.num_experts)
        slots_WTK = slots_WR.view(-1, *ids_TK.shape)
        if hits:
            yield Placement(self.slab, slots_WTK[0])
        complete, near = False, self._transient.slab
        ahead = self._ahead(len(misses), place_of_E.count(EMPTY), *found.state[2:])
        try:
            self.plan.place(ids_TK[-kept:], first=True, count=False)
            for index, wave in enumerate(self._transient.serve(waves, ahead), start=1):
                if not wave.slot_of:
                    continue
                if not found.last.isdisjoint(wave.slot_of):
                    self.plan.fetch_some(near.records_SB, slots_WE[index], self.slab.records_SB)
                yield Placement(near, slots_WTK[index])
            complete = True
        finally:
            if not complete:  # the maps promise experts that have not come yet
                self.plan.fetch(self.records_EB, self.slab.records_SB)

    def _ahead(
        self, num_missing: int, num_absent: int, slot_of_E: Sequence[int] = ()
    ) -> tuple[DeviceStore, list[int]] | None:
        """The next layer and what it lacks, if it will probably need most of that: if this one did."""
        if self.following is None or num_missing < max(1, STREAM_AHEAD * num_absent):
            return None
        return self.following, [expert for expert, slot in enumerate(slot_of_E) if slot == EMPTY]


def _nothing() -> None:
    """A fetch of nothing: whoever waits for it waits for all that was on the second stream before."""
