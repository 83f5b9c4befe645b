"""A cache that keeps a short random projection of each update."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from fedbranch.core.projection import SMALLEST_SIZE, Projection
from fedbranch.tree.edge import Edge, SavedEdge, edge_in_memory, whole_rows
from fedbranch.types import JSON, Array, Vector

__all__ = ["Sketched"]


@dataclass(frozen=True, kw_only=True)
class Sketched:
    """Keep a random projection of every update: less memory, and similarities with an error.

    Parameters
    ----------
    size
        Count of numbers kept of an update, at least 16. A shorter update is kept whole.
        :class:`fedbranch.core.projection.Projection` bounds the error of a similarity: with 1024
        numbers it is typically 0.035, for updates that are spread over many coordinates.
    seed
        Of the projection. Clients that know it can make updates that are similar only here.

    Examples
    --------
    >>> Sketched(size=256).size
    256
    """

    size: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("size", SMALLEST_SIZE), ("seed", 0)):
            value = operator.index(getattr(self, name))
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
            object.__setattr__(self, name, value)

    def prepare(self) -> None:
        """Prepare nothing: memory needs no preparation."""

    def num_kept(self, dim: int) -> int:
        """Return the size of a sketch, or ``dim`` if that is smaller."""
        return min(dim, self.size)

    def compared(self, updates: Array) -> Vector:
        """Sketch updates, shape (num_updates, dim); short ones stay as they are."""
        dim = int(updates.shape[1])
        if self.num_kept(dim) < dim:
            updates = Projection(dim=dim, size=self.size, seed=self.seed).of(updates)
        return whole_rows(updates)

    def keep(self, updates: Mapping[str, Array]) -> Edge:
        """Make one matrix of sketches in memory."""
        return edge_in_memory(updates, self.compared)

    def restore(self, saved: SavedEdge) -> Edge:
        """Read the sketches of a saved edge into memory."""
        return saved.in_memory()

    def to_state(self) -> JSON:
        """Describe the cache for checkpoints."""
        return {"kind": "sketches", "size": self.size, "seed": self.seed}
