"""Where expert weights live: base.py is the contract, records.py the loading, the others one kind of store
each.
"""

from minisgl.moe.store.base import ExpertStore, StoreBytes
from minisgl.moe.store.resident import ResidentStore

__all__ = ["ExpertStore", "ResidentStore", "StoreBytes"]
