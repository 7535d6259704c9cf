"""Put a scheduler together for an engine: allocator, prefix cache, eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minisgl.core import Grammar, TokenConstraint
from minisgl.engine.engine import Engine
from minisgl.eviction import make_policy
from minisgl.kvcache import PageAllocator, make_prefix_cache
from minisgl.models.sizes import kv_bytes_per_token
from minisgl.scheduler.pages import PageManager
from minisgl.scheduler.scheduler import Scheduler


def build_scheduler(
    engine: Engine,
    eviction_policy: Any = None,
    constraint_factory: Callable[[Grammar], TokenConstraint] | None = None,
) -> Scheduler:
    """eviction_policy: an object of the user's own with `score(entry, now)`, instead of the configured one."""
    config = engine.config
    policy = make_policy(config.eviction.build(), eviction_policy)
    page_size = config.cache.page_size
    token_bytes = kv_bytes_per_token(engine.spec, engine.kv_pool.data.itemsize)
    cache = make_prefix_cache(config.cache.cache_type, page_size, policy, token_bytes)
    pages = PageManager(PageAllocator(engine.kv_pool.num_pages), cache)
    return Scheduler(engine, pages, config.scheduler, constraint_factory)
