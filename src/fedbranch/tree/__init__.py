"""The parameter tree: every cluster with its model, and what its edges keep."""

from fedbranch.tree.edge import Edge, EdgeCache, InMemory, OnDisk, Sketched
from fedbranch.tree.tree import Descent, Node, ParameterTree

__all__ = [
    "Descent",
    "Edge",
    "EdgeCache",
    "InMemory",
    "Node",
    "OnDisk",
    "ParameterTree",
    "Sketched",
]
