"""How the tree of a run grew: its nodes and the positions of its clients after every round.

A saved tree has only its last state, and a run saves it every few rounds. The history has every
round: each record names the nodes that came and went, and the clients that moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fedbranch.runs import Round
from fedbranch.server.records import RoundRecord
from fedbranch.tree import ParameterTree

__all__ = ["Branch", "Growth", "grow"]


@dataclass
class Branch:
    """A node of the tree, without its parameters."""

    id: int
    parent_id: int | None
    born_in_round: int
    child_ids: tuple[int, ...] = ()
    split_in_round: int | None = None

    @property
    def is_leaf(self) -> bool:
        """Return whether clients train at this node."""
        return not self.child_ids


@dataclass
class Growth:
    """The tree after a round.

    Attributes
    ----------
    nodes
        Node id -> node, in the order of the ids. Nodes that a merge removed are absent.
    positions
        Client id -> the node at which the client stands.
    children_of
        (round, node) -> ids of the children that the node got in that round.
    """

    nodes: dict[int, Branch] = field(default_factory=lambda: {0: Branch(0, None, 0)})
    positions: dict[str, int] = field(default_factory=dict)
    children_of: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of_tree(cls, tree: ParameterTree) -> Growth:
        """Return the nodes and positions of a tree, for a run without any round."""
        nodes = {
            node.id: Branch(
                node.id, node.parent_id, node.born_in_round, node.child_ids, node.split_in_round
            )
            for node in tree
        }
        return cls(nodes, {client_id: tree.position(client_id) for client_id in tree.client_ids})

    @property
    def leaf_ids(self) -> list[int]:
        """The ids of the clusters in training, ascending."""
        return [node.id for node in self.nodes.values() if node.is_leaf]

    def clients_at(self) -> dict[int, list[str]]:
        """Return the clients at or below every node, sorted by id."""
        clients: dict[int, list[str]] = {node_id: [] for node_id in self.nodes}
        for client_id, position in sorted(self.positions.items()):
            node_id: int | None = position
            while node_id is not None:
                clients[node_id].append(client_id)
                node_id = self.nodes[node_id].parent_id
        return clients

    def follow(self, record: RoundRecord) -> None:
        """Apply what a record says about nodes and clients."""
        split_now = {decision.node_id for decision in record.splits}
        for node_id, child_ids in sorted(record.children.items()):  # parents before children
            # Clusters that were given exist since before the first round.
            in_round = record.round if node_id in split_now else record.round - 1
            self._split(node_id, child_ids, in_round=in_round)
        for client_id in record.left:
            self.positions.pop(client_id, None)
        self.positions |= dict.fromkeys(record.joined, 0)
        self.positions |= record.moved
        if record.vanished:
            self._remove(record.vanished)

    def _split(self, node_id: int, child_ids: tuple[int, ...], *, in_round: int) -> None:
        if node_id not in self.nodes:
            return
        for child_id in child_ids:
            self.nodes[child_id] = Branch(child_id, node_id, in_round)
        self.nodes[node_id].child_ids = child_ids
        self.nodes[node_id].split_in_round = in_round
        self.children_of[in_round, node_id] = child_ids

    def _remove(self, vanished: Mapping[int, int]) -> None:
        """Remove nodes; their clients go to the node named for each, which may be gone itself."""
        for node_id in vanished:
            self.nodes.pop(node_id, None)
        for node in self.nodes.values():
            if vanished.keys() & set(node.child_ids):
                node.child_ids, node.split_in_round = (), None  # it loses all children at once
        for client_id, node_id in self.positions.items():
            while node_id in vanished:
                node_id = vanished[node_id]
            self.positions[client_id] = node_id


def grow(history: Iterable[Round], growth: Growth) -> Iterator[tuple[Round, Growth]]:
    """Follow a history, and yield every round with the tree after it.

    Parameters
    ----------
    history
        All rounds, from the first one on.
    growth
        The tree before the first round. It is changed; every pair has the same object.
    """
    for entry in history:
        growth.follow(entry.record)
        yield entry, growth
