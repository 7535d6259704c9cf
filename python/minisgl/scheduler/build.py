"""Put a scheduler together for an engine: allocator, prefix cache, eviction policy."""

from __future__ import annotations

from collections.abc import Callable

from minisgl.core import Grammar, TokenConstraint
from minisgl.engine.engine import Engine
from minisgl.eviction import EvictionPolicy
from minisgl.kvcache import PageAllocator, make_prefix_cache
from minisgl.models.sizes import kv_bytes_per_token
from minisgl.scheduler.pages import PageManager
from minisgl.scheduler.scheduler import Scheduler


def build_scheduler(
    engine: Engine,
    policy: EvictionPolicy,
    constraint_factory: Callable[[Grammar], TokenConstraint] | None = None,
) -> Scheduler:
    """policy: what the prefix cache gives up first, from `eviction.make_policy`; make it before the engine, and a mistake in it
    shows before a model is loaded.
    """
    config = engine.config
    page_size = config.cache.page_size
    token_bytes = kv_bytes_per_token(engine.spec, engine.kv_pool.data.itemsize, engine.group.size)
    cache = make_prefix_cache(config.cache.cache_type, page_size, policy, token_bytes)
    pages = PageManager(PageAllocator(engine.kv_pool.num_pages), cache)
    return Scheduler(engine, pages, config.scheduler, constraint_factory)
