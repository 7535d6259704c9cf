"""Builds the real engine inside the engine process: weights, pages, scheduler, grammars, and the expert map."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minisgl.config import EngineConfig
from minisgl.core import Grammar, TokenConstraint
from minisgl.engine.engine import Engine
from minisgl.engine.memory import DoesNotFit
from minisgl.eviction import make_policy
from minisgl.planner import explain_misfit, options_of
from minisgl.scheduler.build import build_scheduler
from minisgl.server.engine_process import EngineParts
from minisgl.server.expert_watch import ExpertWatch
from minisgl.server.ipc import EngineFacts
from minisgl.server.structured import GrammarFactory
from minisgl.text import Tokenizer


@dataclass(frozen=True)
class ModelEngine:
    """A picklable recipe. folder: the model's local folder. watch_experts: record routing for the live view. It forgoes CUDA
    graphs, so on a GPU it is for looking, not for speed; on a CPU it is always on.
    """

    config: EngineConfig
    folder: str
    watch_experts: bool = False

    def __call__(self) -> EngineParts:
        """Load the model. ValueError, with the remedy, for anything that cannot work."""
        device = self.config.model.device
        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        policy = make_policy(self.config.eviction.build())
        try:
            engine = Engine(self.config, Path(self.folder), record_routing=self.watch_experts or on_cpu)
        except DoesNotFit as error:
            raise error.explained(explain_misfit(error, options_of(self.config))) from error
        scheduler = build_scheduler(engine, policy, _LazyGrammars(self.folder, engine.vocab_size))
        moe = engine.spec.moe
        num_experts = moe.num_experts if moe is not None else 0
        facts = EngineFacts(engine.max_seq_len, engine.vocab_size, engine.spec.num_layers, num_experts)
        parts = EngineParts(scheduler, facts, check=engine.ranks.check, close=engine.close)
        watch = ExpertWatch.of(engine)
        return parts if watch is None else replace(parts, experts=watch.map, numbers=watch.numbers)


class _LazyGrammars:
    """A `GrammarFactory` that loads the tokenizer at the first grammar."""

    def __init__(self, folder: str, vocab_size: int):
        self._folder, self._vocab_size = folder, vocab_size
        self._factory: GrammarFactory | None = None

    def __call__(self, grammar: Grammar) -> TokenConstraint:
        if self._factory is None:
            self._factory = GrammarFactory(Tokenizer.load(self._folder), self._vocab_size)
        return self._factory(grammar)
