"""Where expert weights live: base.py is the contract, records.py the loading, the others one kind of store
each. planning.py decides what a cache keeps, pinned.py and copies.py are its host side.
"""

from minisgl.moe.store.base import CacheCounters, CacheView, ExpertStore, StoreBytes
from minisgl.moe.store.resident import ResidentStore
from minisgl.moe.store.staged import StagedStore

__all__ = ["CacheCounters", "CacheView", "ExpertStore", "ResidentStore", "StagedStore", "StoreBytes"]
