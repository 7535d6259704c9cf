"""What to give up first: scores for cached prefixes, and for anything else that is cached (lowest goes
first).

A score function sees one immutable `Entry` and nothing of where it is kept: no tree, no pages, no slots. So
the same functions rank unreferenced leaves of the prefix cache and slots of an expert cache. Ranking itself
is in `kvcache.victims`.

    holder keeps a History a thing   --Recorder-->   History   --score(entry, now)-->   rank

Built-in scores never change order merely because time passes. That is what lets a heap keep them:
- lru, lfu and lru-k read stamps and counts only.
- frequency-decay is C(now) = sum over uses of 2^((t_use - now) / half_life). Its logarithm is log2(sum
  2^(t_use / half_life)) minus now / half_life; the second term is the same for every entry, so the first
  alone (`History.heat`) gives the order.
- cost-aware multiplies C(now) by cost / bytes: the same argument, with log2(cost / bytes) added.
A user's own score may do as it likes; `kvcache.victims` says what is promised for it.

lru-k: O'Neil et al., "The LRU-K page replacement algorithm" (1993). adaptive: after Vietri et al., "Driving
cache replacement with ML-based LeCaR" (2018), with the changes that `kvcache.adaptive` explains.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol


class History(NamedTuple):
    """How a thing was used: a value, so two halves of a split thing may share it.

    num_uses: times used. last_use: seconds. kth_use: time of the K-th latest use, -inf before K uses; times:
    the latest K, oldest first. heat: log2 of the sum of 2^(time / half_life) over all uses. (A NamedTuple:
    millions are made, and a frozen dataclass takes three times as long to make.)
    """

    num_uses: int
    times: tuple[float, ...]
    kth_use: float
    heat: float

    @property
    def last_use(self) -> float:
        return self.times[-1]


@dataclass(frozen=True)
class Recorder:
    """Makes histories. k: uses remembered one by one; half_life: seconds after which a use counts half."""

    k: int = 2
    half_life: float = 600.0

    def first(self, now: float) -> History:
        return History(1, (now,), now if self.k == 1 else -math.inf, now / self.half_life)

    def again(self, history: History, now: float) -> History:
        """One more use."""
        times = (*history.times, now)[-self.k :]
        kth_use = times[0] if len(times) == self.k else -math.inf
        low, high = sorted((history.heat, now / self.half_life))
        return History(history.num_uses + 1, times, kth_use, high + math.log2(1.0 + 2.0 ** (low - high)))

    def refresh(self, history: History, now: float) -> History:
        """Still the same use: it lasted until now. Not counted again, or one long request would look like
        many.
        """
        times = (*history.times[:-1], now)
        kth_use = now if self.k == 1 else history.kth_use
        return History(history.num_uses, times, kth_use, max(history.heat, now / self.half_life))


class Entry(NamedTuple):
    """What a score function may know of one candidate.

    cost: what getting it back would take, in any one unit (`recompute_cost` for prefixes, bytes to fetch for
    experts). num_bytes: memory it takes. num_tokens, depth: length of a prefix's segment and tokens before
    it; 0 for other things.
    """

    history: History
    cost: float
    num_bytes: int
    num_tokens: int = 0
    depth: int = 0

    @property
    def num_uses(self) -> int:
        return self.history.num_uses

    @property
    def last_use(self) -> float:
        return self.history.last_use


def recompute_cost(depth: int, num_tokens: int) -> float:
    """Cost of computing a segment again, in token pairs: num_tokens x (depth + num_tokens / 2), attention's
    work.
    """
    return num_tokens * (depth + num_tokens / 2)


# Attention to this many tokens is as much work as all else a token needs. For the layers of Qwen3-30B-A3B it would be
# 2 x 2.7e9 / (4 x 32 x 128 x 48) = 6,900; for dense models it is more.
LINEAR_TOKENS = 8192


def recompute_work(depth: int, num_tokens: int) -> float:
    """The same with the work that does not grow with depth. What a wrong eviction is blamed for: by `recompute_cost` alone, the
    first page of a prompt would be free, though most of a short prompt's work is in its matrix products.
    """
    return num_tokens * (LINEAR_TOKENS + depth + num_tokens / 2)


ScoreFn = Callable[[Entry, float], float]


# What cost-aware takes off a thing that was used once only. Most texts never come again, and one that did is far likelier to: a
# tenth is a round number from the traces of benchmark/eviction.py, where 0.02 to 0.1 serve alike and 1 loses to lru.
LOG2_USED_ONCE = math.log2(0.1)


def lru(entry: Entry, now: float) -> float:
    return entry.history.times[-1]


def lfu(entry: Entry, now: float) -> float:
    return entry.history.num_uses


def lru_k(entry: Entry, now: float) -> float:
    return entry.history.kth_use


def frequency_decay(entry: Entry, now: float) -> float:
    return entry.history.heat


def cost_aware(entry: Entry, now: float) -> float:
    unproven = 0.0 if entry.history.num_uses > 1 else LOG2_USED_ONCE
    return entry.history.heat + unproven + math.log2(entry.cost / entry.num_bytes)


SCORES: dict[str, ScoreFn] = {
    "lru": lru,
    "lfu": lfu,
    "lru-k": lru_k,
    "frequency-decay": frequency_decay,
    "cost-aware": cost_aware,
}
ADAPTIVE = "adaptive"
POLICIES = (*SCORES, ADAPTIVE)


class UserPolicy(Protocol):
    """A user's own policy: anything with `score`. Lowest goes first; ties go to the longer unused.

    Two optional members: `on_ghost_hit(entry, now)` is told of each evicted page that would have been a hit;
    `static_order = True` promises that two entries never change order merely because time passes, and saves
    scoring them again.
    """

    def score(self, entry: Entry, now: float) -> float: ...


@dataclass(frozen=True)
class Scorer:
    """A score function and what is known of it. trusted: built in, so its answers need no check."""

    name: str
    score: ScoreFn
    trusted: bool = True
    static_order: bool = True
    on_ghost_hit: Callable[[Entry, float], None] | None = None


LRU = Scorer("lru", lru)


@dataclass(frozen=True)
class EvictionPolicy:
    """A policy ready to rank with. Several scorers: a learner chooses among them; one: no learner, no
    weights.
    """

    name: str
    scorers: tuple[Scorer, ...]
    recorder: Recorder
    ghost_capacity: int = 0
    learning_rate: float = 0.0
    seed: int = 0


def _flag(name: str, value: Any, kind: type, low: float, remedy: str, exclusive: bool = False) -> None:
    number = isinstance(value, int) if kind is int else isinstance(value, (int, float))
    if (
        isinstance(value, bool)
        or not number
        or not math.isfinite(value)
        or value < low
        or (exclusive and value == low)
    ):
        raise ValueError(f"{name} {value!r} is not allowed: {remedy}")


@dataclass(frozen=True)
class EvictionConfig:
    """How the prefix cache chooses what to give up; each field is one flag. `resolve` checks and completes
    it.

    policy: a name of POLICIES, or an import path "package.module:Class" of a `UserPolicy`. k: uses lru-k
    looks back. half_life: seconds after which a use counts half (frequency-decay, cost-aware). experts: what
    adaptive chooses among. learning_rate: how fast adaptive moves its weights. seed: of adaptive's draws.
    ghost_capacity: evicted pages remembered.
    """

    policy: str = "lru"
    k: int = 2
    half_life: float = 600.0
    experts: tuple[str, ...] = ("lru", "lfu", "cost-aware")
    learning_rate: float = 0.05
    seed: int = 0
    ghost_capacity: int = 65536

    def resolve(self) -> EvictionConfig:
        """The same, checked, with experts as a tuple (a comma-separated string is split). ValueError names
        the flag.
        """
        experts = self.experts
        if isinstance(experts, str):
            experts = [name.strip() for name in experts.split(",") if name.strip()]
        resolved = replace(self, experts=tuple(experts))
        resolved.validate()
        return resolved

    def validate(self) -> None:
        """Raise ValueError, naming the flag and the remedy, for anything that can't work."""
        if not isinstance(self.policy, str) or (self.policy not in POLICIES and ":" not in self.policy):
            raise ValueError(
                f"--cache-eviction-policy {self.policy!r} is unknown: use one of {', '.join(POLICIES)}, "
                "or package.module:Class for your own (an object goes into LLM(eviction_policy=...))"
            )
        _flag("--eviction-k", self.k, int, 1, "use a whole number of at least 1")
        _flag("--eviction-half-life", self.half_life, float, 0, "use more than 0 seconds", exclusive=True)
        _flag("--adaptive-learning-rate", self.learning_rate, float, 0, "use more than 0", exclusive=True)
        _flag("--adaptive-seed", self.seed, int, 0, "use a whole number of at least 0")
        _flag("--eviction-ghost-capacity", self.ghost_capacity, int, 0, "use a whole number of at least 0")
        self._validate_experts()

    def _validate_experts(self) -> None:
        flag, known = "--adaptive-experts", f"use some of {', '.join(SCORES)}"
        if not self.experts:
            raise ValueError(f"{flag} is empty: {known}")
        for name in self.experts:
            if name == ADAPTIVE:
                raise ValueError(f"{flag} can't hold adaptive itself: {known}")
            if name not in SCORES:
                raise ValueError(f"{flag} {name!r} is unknown: {known}")
        if len(set(self.experts)) != len(self.experts):
            raise ValueError(f"{flag} {','.join(self.experts)} repeats an expert: name each once")
        if self.policy == ADAPTIVE and self.ghost_capacity == 0:
            raise ValueError(
                "--eviction-ghost-capacity 0 leaves adaptive nothing to learn from: use at least 1"
            )


def make_policy(
    config: EvictionConfig | None = None, custom: UserPolicy | type | None = None
) -> EvictionPolicy:
    """The policy that `config` describes (default: lru); `custom`, an object or class of the user's own, goes
    before config.policy.

    Raises ValueError for a bad configuration, an import path that leads nowhere, or an object without
    `score(entry, now)`.
    """
    if isinstance(custom, str):
        raise ValueError(f"eviction_policy={custom!r} is a name: pass it as cache_eviction_policy")
    config = (config or EvictionConfig()).resolve()
    recorder = Recorder(config.k, config.half_life)
    if custom is None and ":" in config.policy:
        custom = _imported(config.policy)
    if custom is not None:
        scorer = _user_scorer(custom)
        ghosts = config.ghost_capacity if scorer.on_ghost_hit else 0
        return EvictionPolicy(scorer.name, (scorer,), recorder, ghosts)
    if config.policy == ADAPTIVE:
        scorers = tuple(Scorer(name, SCORES[name]) for name in config.experts)
        return EvictionPolicy(
            ADAPTIVE, scorers, recorder, config.ghost_capacity, config.learning_rate, config.seed
        )
    return EvictionPolicy(config.policy, (Scorer(config.policy, SCORES[config.policy]),), recorder)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    flag = f"--cache-eviction-policy {path!r}"
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{flag}: importing {module!r} failed ({error}); is it on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"{flag}: module {module!r} has no {name!r}") from error
    except Exception as error:
        raise ValueError(f"{flag}: importing {module!r} raised {type(error).__name__}: {error}") from error


def _user_scorer(custom: Any) -> Scorer:
    name = custom.__name__ if isinstance(custom, type) else type(custom).__name__
    if isinstance(custom, type):
        try:
            custom = custom()
        except Exception as error:
            raise ValueError(
                f"eviction policy {name}: creating it raised {type(error).__name__}: {error}; "
                "pass an object instead if it needs arguments"
            ) from error
    ghost = getattr(custom, "on_ghost_hit", None)
    if not callable(getattr(custom, "score", None)):
        raise ValueError(f"eviction policy {name} has no score(entry, now): add one that returns a number")
    if ghost is not None and not callable(ghost):
        raise ValueError(
            f"eviction policy {name}: on_ghost_hit must be a function of (entry, now), or absent"
        )
    static = bool(getattr(custom, "static_order", False))
    on_ghost_hit = custom.on_ghost_hit if ghost is not None else None
    return Scorer(name, custom.score, trusted=False, static_order=static, on_ghost_hit=on_ghost_hit)
