"""How a tree grew: which nodes there were, and who stood where, after every round.

A saved tree knows only its last state, and a run that is going on saves it every few rounds.
The history has the rest: followed from the first round on, it says where everybody stood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedbranch.rules import Decision
from fedbranch.runs import Round
from fedbranch.server.records import RoundRecord
from fedbranch.tree import ParameterTree

__all__ = ["Branch", "Growth", "Saved", "grow"]


@dataclass
class Branch:
    """A node of the tree, without its numbers."""

    id: int
    parent_id: int | None
    born_in_round: int
    child_ids: tuple[int, ...] = ()
    split_in_round: int | None = None


@dataclass(frozen=True)
class Saved:
    """A tree that was saved, and the round after which it was."""

    tree: ParameterTree
    round: int


@dataclass
class Growth:
    """The tree after some rounds.

    Attributes
    ----------
    nodes
        Those that there are, by id. Clusters that were merged back are gone.
    positions
        Client id -> the node at which it stands.
    children_of
        (round, node) -> ids of the children that it was split into then.
    """

    nodes: dict[int, Branch] = field(default_factory=lambda: {0: Branch(0, None, 0)})
    positions: dict[str, int] = field(default_factory=dict)
    children_of: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    _next_id: int = 1
    _home: dict[str, int] = field(default_factory=dict)  # where newcomers begin, if not at the root

    def clients_at(self) -> dict[int, list[str]]:
        """Give the clients at or below every node, in the order of their ids."""
        clients: dict[int, list[str]] = {node_id: [] for node_id in self.nodes}
        for client_id, position in sorted(self.positions.items()):
            node_id: int | None = position
            while node_id is not None:
                clients[node_id].append(client_id)
                node_id = self.nodes[node_id].parent_id
        return clients

    def begin_with(self, first: RoundRecord, saved: Saved | None) -> None:
        """Start from given clusters, if there were any before the first round."""
        num_found = sum(len(split.groups) for split in first.splits)
        num_given = max(first.cluster_sizes, default=0) - num_found
        if num_given > 0:
            self._split(0, num_given, in_round=0)
        if saved is not None and saved.tree.root.split_in_round == 0:
            tree = saved.tree
            self._home = {client_id: tree.position(client_id) for client_id in tree.client_ids}

    def follow(self, record: RoundRecord) -> None:
        """Change as the server did in a round."""
        for client_id in record.left:
            self.positions.pop(client_id, None)
        for client_id in record.joined:
            self.positions[client_id] = self._home.get(client_id, 0)
        for move in record.routed:
            self._place(move.client_id, move.to_node)
        for decision in record.decisions:
            if decision.verdict == "split":
                self._carry_out(decision)
        for decision in record.decisions:
            if decision.verdict == "merge":
                self._merge(decision.node_id)
            for client_id, leaf_id in decision.moves.items():
                self._place(client_id, leaf_id)

    def take_over(self, tree: ParameterTree) -> None:
        """Be as a saved tree is: it knows what no record tells."""
        self.nodes = {
            node.id: Branch(
                node.id, node.parent_id, node.born_in_round, node.child_ids, node.split_in_round
            )
            for node in tree
        }
        self.positions = {client_id: tree.position(client_id) for client_id in tree.client_ids}
        self._next_id = max(self._next_id, *(node_id + 1 for node_id in self.nodes))

    def _place(self, client_id: str, node_id: int) -> None:
        if node_id in self.nodes:
            self.positions[client_id] = node_id

    def _carry_out(self, split: Decision) -> None:
        if split.node_id not in self.nodes or self.nodes[split.node_id].child_ids:
            return
        child_ids = self._split(split.node_id, len(split.groups), in_round=split.round)
        for child_id, client_ids in zip(child_ids, split.groups, strict=True):
            for client_id in client_ids:
                self.positions[client_id] = child_id

    def _split(self, node_id: int, num_groups: int, *, in_round: int) -> tuple[int, ...]:
        # The server counts its nodes up and uses no number twice.
        child_ids = tuple(range(self._next_id, self._next_id + num_groups))
        self._next_id += num_groups
        for child_id in child_ids:
            self.nodes[child_id] = Branch(child_id, node_id, in_round)
        self.nodes[node_id].child_ids = child_ids
        self.nodes[node_id].split_in_round = in_round
        self.children_of[in_round, node_id] = child_ids
        return child_ids

    def _merge(self, node_id: int) -> None:
        if node_id not in self.nodes:
            return
        below = list(self.nodes[node_id].child_ids)
        for child_id in below:  # grows while we walk over it
            below.extend(self.nodes[child_id].child_ids)
        gone = set(below)
        for client_id, position in self.positions.items():
            if position in gone:
                self.positions[client_id] = node_id
        for child_id in gone:
            del self.nodes[child_id]
        self.nodes[node_id].child_ids = ()
        self.nodes[node_id].split_in_round = None


def grow(
    history: Sequence[Round], saved: Saved | None, growth: Growth
) -> Iterator[tuple[Round, Growth]]:
    """Follow a history; give every round, and the tree as it was after it.

    Parameters
    ----------
    history
        All rounds.
    saved
        The tree as saved last, not later than the last round; None if nothing was saved.
    growth
        Grows. It is the same object in every round.
    """
    if history:
        growth.begin_with(history[0].record, saved)
    elif saved is not None:
        growth.take_over(saved.tree)
    for entry in history:
        growth.follow(entry.record)
        if saved is not None and entry.record.round == saved.round:
            growth.take_over(saved.tree)
        yield entry, growth
