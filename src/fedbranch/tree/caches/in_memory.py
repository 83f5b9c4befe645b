"""A cache that keeps whole updates in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedbranch.tree.edge import Edge, SavedEdge, edge_in_memory, whole_rows
from fedbranch.types import Array, Vector

__all__ = ["InMemory"]


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Keep whole updates in memory: exact, and right for small populations."""

    def prepare(self) -> None:
        """Prepare nothing: memory needs no preparation."""

    def num_kept(self, dim: int) -> int:
        """Return ``dim``: all numbers are kept."""
        return dim

    def compared(self, updates: Array) -> Vector:
        """Return the updates, shape (num_updates, dim), as float32 on the host."""
        return whole_rows(updates)

    def keep(self, updates: Mapping[str, Array]) -> Edge:
        """Copy updates into one matrix in memory."""
        return edge_in_memory(updates, self.compared)

    def restore(self, saved: SavedEdge) -> Edge:
        """Read a saved edge into memory."""
        return saved.in_memory()

    def to_state(self) -> None:
        """Return None, which describes this cache in checkpoints."""
