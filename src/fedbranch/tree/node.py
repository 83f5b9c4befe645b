"""A node of the tree: a cluster's parameters, and its place among the other nodes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from fedbranch.storage.checkpoint import LastingTensors
from fedbranch.tree.edge import Edge
from fedbranch.types import Vector

__all__ = ["Node", "read_only"]


@dataclass(eq=False)
class Node:
    """A cluster's place in the tree."""

    id: int
    parent_id: int | None
    params: Vector  # θ − θ0: in training at a leaf, stationary and frozen at an inner node
    buffers: Vector
    born_in_round: int
    version: int = 0  # grows with every change of params or buffers
    child_ids: tuple[int, ...] = ()
    split_in_round: int | None = None
    # The paper's Δ_e on the edge from the parent: pre-split updates by client id.
    cached_updates: Edge = field(default_factory=Edge)
    _base: str = field(default="", repr=False)
    # For checkpoints: the tensors of a frozen node never change.
    _frozen: LastingTensors | None = field(default=None, repr=False)

    @property
    def is_leaf(self) -> bool:
        """Return whether the node is a cluster in training."""
        return not self.child_ids

    def become_leaf(self) -> None:
        """Forget the split: the parameters θ* are in training again."""
        self.child_ids = ()
        self.split_in_round = None
        self._frozen = None

    def tensors(self) -> dict[str, Vector]:
        """Return the parameters and buffers, under names that no other node has."""
        return {f"params-{self.id}": self.params, f"buffers-{self.id}": self.buffers}

    def frozen_tensors(self) -> LastingTensors:
        """Return the parameters and buffers of an inner node, which never change."""
        if self._frozen is None:
            tensors = self.tensors()
            self._frozen = LastingTensors(lambda: tensors)
        return self._frozen

    @property
    def base(self) -> str:
        """A name for exactly these parameters: updates with the same base may be compared.

        It contains a digest of the numbers, because a server that went back to an older
        checkpoint may reach the same version by another way.
        """
        prefix = f"{self.id}.{self.version}-"
        if not self._base.startswith(prefix):
            digest = hashlib.sha256(self.params.tobytes() + self.buffers.tobytes())
            self._base = prefix + digest.hexdigest()[:12]
        return self._base


def read_only(vector: Vector) -> Vector:
    """Return a read-only view of a vector."""
    view = vector.view()
    view.flags.writeable = False
    return view
