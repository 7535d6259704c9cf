"""Which candidate goes next: heaps of scored candidates, and what happens when a user's policy fails.

`Victims` never touches what it ranks: it names a victim, and the holder removes it. So a wrong or failing
score can spoil the order, but not lose a page.

Cost. A change only notes the candidate; it is scored when a victim is next wanted, however often it changed
in between. A heap keeps outdated items until they surface (or outnumber the live ones, when the heap is
rebuilt). Each change thus costs one push and one pop: O(log n) amortised, and no scan.

Scores that change with time. Built-in ones keep their order (see `eviction`), so an item in the heap stays in
place. For a user's policy without `static_order`, every choice scores the `_REFRESH` candidates again that
were scored longest ago, and the one that comes up itself: a score is at most n / _REFRESH choices old, so the
order is approximate, at the same O(log n).
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import count, islice
from numbers import Real
from typing import Any, NamedTuple

from minisgl.eviction import LRU, Entry, EvictionPolicy, Scorer
from minisgl.kvcache.adaptive import Ghost, GhostList, Learner

logger = logging.getLogger(__name__)
_REFRESH = 8
_SLACK = 64  # outdated items a heap may hold before it is rebuilt, beside one a live item


class PolicyFailure(Exception):
    """A user's policy raised, or answered with something that is no number."""


class Victim(NamedTuple):
    """What to evict next. blame and probability are for the ghost list, see `adaptive.Ghost`."""

    candidate: Any
    entry: Entry
    blame: tuple[int, ...] = (0,)
    probability: float = 1.0


class _Ranking:
    """A heap over one score function. An item counts only while its entry is the candidate's current one."""

    def __init__(self, scorer: Scorer, live: OrderedDict[Any, Entry]) -> None:
        self.scorer = scorer
        self._live = live
        self._heap: list[tuple[float, float, int, Any, Entry]] = []
        self._serial = count()

    def push(self, candidate: Any, entry: Entry, now: float) -> None:
        """Raises PolicyFailure, and changes nothing, if a user's policy has no good answer."""
        score = (
            self.scorer.score(entry, now) if self.scorer.trusted else checked_score(self.scorer, entry, now)
        )
        self.push_scored(candidate, entry, score)

    def push_scored(self, candidate: Any, entry: Entry, score: float) -> None:
        heapq.heappush(self._heap, (score, entry.history.times[-1], next(self._serial), candidate, entry))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [item for item in self._heap if self._live.get(item[3]) is item[4]]
            heapq.heapify(self._heap)

    def top(self) -> Any | None:
        """The candidate with the lowest score, left in place."""
        heap, live = self._heap, self._live
        while heap and live.get(heap[0][3]) is not heap[0][4]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None


def checked_score(scorer: Scorer, entry: Entry, now: float) -> float:
    """The score as a float, maybe infinite; PolicyFailure, with the policy's name, if there is none."""
    try:
        answer = scorer.score(entry, now)
        if isinstance(answer, bool) or not isinstance(answer, Real):
            raise TypeError(f"score returned {answer!r}, not a number")
        score = float(answer)
    except Exception as error:
        raise PolicyFailure(f"{scorer.name}: {type(error).__name__}: {error}") from error
    if math.isnan(score):
        raise PolicyFailure(f"{scorer.name}: score returned NaN")
    return score


class Victims:
    """Candidates under one policy. describe(candidate) gives its entry, asked for once a change at most.

    num_failures: choices for which a user's policy failed and lru stood in. learner: adaptive's, else None.
    """

    def __init__(self, policy: EvictionPolicy, describe: Callable[[Any], Entry]) -> None:
        self.policy = policy
        self.num_failures = 0
        self.num_ghost_hits = 0
        self._num_evicted = 0
        self._describe = describe
        self._changed: dict[Any, None] = {}
        self._unscored: dict[Any, None] = {}
        self._live: OrderedDict[Any, Entry] = OrderedDict()
        self._rankings = [_Ranking(scorer, self._live) for scorer in policy.scorers]
        self._user = None if policy.scorers[0].trusted else self._rankings[0]
        self._fallback = _Ranking(LRU, self._live) if self._user else None
        self.ghosts = GhostList(policy.ghost_capacity) if policy.ghost_capacity else None
        self.learner: Learner | None = None
        if len(policy.scorers) > 1:
            self.learner = Learner(len(policy.scorers), policy.learning_rate, policy.seed)

    def put(self, candidate: Any) -> None:
        """The candidate may be evicted from now on, or its entry changed."""
        self._changed[candidate] = None

    def discard(self, candidate: Any) -> None:
        """The candidate must not be evicted; it need not be known."""
        self._changed.pop(candidate, None)
        self._unscored.pop(candidate, None)
        self._live.pop(candidate, None)

    def select(self, now: float) -> Victim | None:
        """The next victim, or None if there is no candidate. Changes nothing: the holder discards it, or puts
        it again.
        """
        self._take_changes(now)
        if not self._live:
            return None
        if self.learner is not None:
            return self._select_by_learner(self.learner)
        if self._user is None:
            return self._victim(self._rankings[0].top())
        try:
            return self._victim(self._select_by_user(self._user, now))
        except PolicyFailure as failure:
            self._count_failure(failure)
            assert self._fallback is not None
            return self._victim(self._fallback.top())

    def evicted(self, victim: Victim, pages: Sequence[tuple[Hashable, Entry]]) -> None:
        """Remember the pages that went with `victim` as ghosts, by the key that `missed` will ask for.

        Only to be called when `ghosts` is not None.
        """
        assert self.ghosts is not None
        for key, entry in pages:
            ghost = Ghost(entry, victim.blame, victim.probability, len(pages), self._num_evicted)
            self.ghosts.put(key, ghost)
            self._num_evicted += 1

    def missed(self, key: Hashable, now: float, num_held: int) -> bool:
        """A request asked for the page `key`, which is not among the num_held pages held: was it evicted not long ago?"""
        if self.ghosts is None or key not in self.ghosts:
            return False
        ghost = self.ghosts.regret(key)
        if ghost is None:
            return True
        self.num_ghost_hits += 1
        if self.learner is not None:
            self.learner.penalise(ghost, (self._num_evicted - ghost.serial) / max(1, num_held))
        elif (tell := self.policy.scorers[0].on_ghost_hit) is not None:
            try:
                tell(ghost.entry, now)
            except Exception as error:
                self._count_failure(PolicyFailure(f"{self.policy.name}: {type(error).__name__}: {error}"))
        return True

    def _take_changes(self, now: float) -> None:
        trusted = [self._fallback] if self._fallback else self._rankings
        for candidate in self._changed:
            entry = self._describe(candidate)
            self._live[candidate] = entry
            for ranking in trusted:
                ranking.push(candidate, entry, now)
        if self._user is not None:
            self._unscored.update(self._changed)
        self._changed.clear()

    def _victim(self, candidate: Any) -> Victim:
        return Victim(candidate, self._live[candidate])

    def _select_by_learner(self, learner: Learner) -> Victim:
        named = [ranking.top() for ranking in self._rankings]
        candidate = named[learner.draw()]
        blame = tuple(expert for expert, other in enumerate(named) if other is candidate)
        return Victim(candidate, self._live[candidate], blame, learner.probability(blame))

    def _select_by_user(self, ranking: _Ranking, now: float) -> Any:
        """The user's choice. Scores first what has no score; a failure leaves the rest for the next time."""
        while self._unscored:
            candidate = next(reversed(self._unscored))
            ranking.push(candidate, self._live[candidate], now)
            self._unscored.popitem()
        if not ranking.scorer.static_order:
            for candidate in list(islice(self._live, _REFRESH)):
                self._score_again(ranking, candidate, now)
            for _ in range(_REFRESH):
                candidate = ranking.top()
                self._score_again(ranking, candidate, now)
                if ranking.top() is candidate:
                    break
        return ranking.top()

    def _score_again(self, ranking: _Ranking, candidate: Any, now: float) -> None:
        """A new entry object outdates the old item in every heap, so lru's ranking gets the new one too."""
        entry = self._live[candidate]._replace()
        score = checked_score(ranking.scorer, entry, now)
        self._live[candidate] = entry
        self._live.move_to_end(candidate)
        assert self._fallback is not None
        self._fallback.push(candidate, entry, now)
        ranking.push_scored(candidate, entry, score)

    def _count_failure(self, failure: PolicyFailure) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning("eviction policy %s; lru stands in whenever it fails (said once)", failure)
