"""The result of a clustered federation."""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from fedbranch.flower.arrays import Layout
from fedbranch.protocol.client_ids import some_of
from fedbranch.runs import Round
from fedbranch.tree import ParameterTree

__all__ = ["ClusteredResult"]


@dataclass(repr=False, kw_only=True)
class ClusteredResult(Result):
    """Flower's ``Result``, with the clusters beside it.

    Attributes
    ----------
    arrays
        The model at the tree's root. Before the first split it is the one model; later it is the
        model of plain federated learning at the moment of the split.
    tree
        The parameter tree.
    node_ids
        Client id -> Flower's id of its node, when it was last connected.
    names
        Client id -> the name under which its node was registered, if any.
    history
        Every round: decisions with their reasons, refusals, evaluations.
    """

    tree: ParameterTree
    layout: Layout
    node_ids: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    history: list[Round] = field(default_factory=list)

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> ids of the clients that train there."""
        return {leaf.id: self.tree.members(leaf.id) for leaf in self.tree.leaves}

    @property
    def assignments(self) -> dict[str, int]:
        """Client id -> its position in the tree: a leaf, or a node from which it is routed on."""
        return {client_id: self.tree.position(client_id) for client_id in self.tree.client_ids}

    def arrays_at(self, position: int) -> ArrayRecord:
        """Return the model at a position in the tree."""
        at = self.tree[position]
        return self.layout.record(self.layout.arrays_at(at.params, at.buffers))

    def arrays_of(self, client_id: str) -> ArrayRecord:
        """Return a client's model."""
        if client_id not in self.tree:
            there = [
                f"{i} ({self.names[i]})" if i in self.names else i for i in self.tree.client_ids
            ]
            raise ValueError(f"there is no client {client_id!r}; the clients are {some_of(there)}")
        return self.arrays_at(self.tree.position(client_id))

    def __repr__(self) -> str:
        return "\n".join(["Clusters:", *(f"\t{line}" for line in self.lines()), super().__repr__()])

    def lines(self) -> list[str]:
        """Describe every cluster in a line: its leaf and its clients."""
        return [
            f"leaf {leaf}: {len(client_ids)} clients: "
            + ", ".join(sorted(self.names.get(client_id, client_id) for client_id in client_ids))
            for leaf, client_ids in self.clusters.items()
        ]
