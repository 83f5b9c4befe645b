"""The caches that we ship: in memory, sketched, on disk; and how checkpoints name a cache."""

from fedbranch.tree.caches.in_memory import InMemory
from fedbranch.tree.caches.on_disk import OnDisk
from fedbranch.tree.caches.saved import cache_to_state, restored_cache
from fedbranch.tree.caches.sketched import Sketched

__all__ = ["InMemory", "OnDisk", "Sketched", "cache_to_state", "restored_cache"]
