"""The parameter tree: every cluster with its model, and what its edges keep.

Other rooms import from here.
"""

from fedbranch.tree.caches import InMemory, OnDisk, Sketched, cache_to_state, restored_cache
from fedbranch.tree.descent import Descent
from fedbranch.tree.edge import Edge, EdgeCache, SavedEdge, make_edge, row_blocks
from fedbranch.tree.node import Node, read_only
from fedbranch.tree.tree import ParameterTree

__all__ = [
    "Descent",
    "Edge",
    "EdgeCache",
    "InMemory",
    "Node",
    "OnDisk",
    "ParameterTree",
    "SavedEdge",
    "Sketched",
    "cache_to_state",
    "make_edge",
    "read_only",
    "restored_cache",
    "row_blocks",
]
