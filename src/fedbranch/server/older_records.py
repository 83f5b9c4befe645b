"""Records of run folders of schema 2, completed with what they do not name.

A record of today names the children of every split, the nodes that vanished and the clients that
moved. An older one does not: what the server did then follows from its decisions, by the rules
that are written down here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbranch.tree import ParameterTree
from fedbranch.types import JSON

__all__ = ["OlderRecords"]

ROOT = 0


class OlderRecords:
    """Completes the records of a history one after the other, from the first round on.

    Parameters
    ----------
    saved
        The tree that was saved with the history; None if there is none. Where clusters were
        given, it alone knows where clients joined.
    saved_after
        Number of the round after which it was saved.

    Examples
    --------
    >>> older = OlderRecords()
    >>> first = {"round": 1, "joined": ["a", "b"], "left": [], "routed": [],
    ...          "cluster_sizes": {"0": 2}, "decisions": []}
    >>> older.complete(first)["moved"]
    {}
    >>> split = {"node_id": 0, "verdict": "split", "groups": [["a"], ["b"]], "moves": {}}
    >>> second = {**first, "round": 2, "joined": [], "decisions": [split]}
    >>> completed = older.complete(second)
    >>> completed["children"], completed["moved"]
    ({'0': [1, 2]}, {'a': 1, 'b': 2})
    """

    def __init__(self, saved: ParameterTree | None = None, saved_after: int = 0) -> None:
        self._saved, self._saved_after = saved, saved_after
        self._children: dict[int, list[int]] = {ROOT: []}  # node -> its children
        self._positions: dict[str, int] = {}
        self._next_id = 1
        self._home: dict[str, int] = {}  # where clients join, if not at the root
        self._made: dict[int, list[int]] = {}  # in this round: node -> children
        self._vanished: dict[int, int] = {}  # in this round: node -> where its clients stand

    def complete(self, line: JSON) -> JSON:
        """Return a line of the history with ``children``, ``vanished`` and ``moved``.

        A line that has them, because a newer version went on with the run, stays as it is.
        """
        before = {**self._positions, **dict.fromkeys(line["joined"], ROOT)}
        self._made, self._vanished = {}, {}
        if "moved" in line:
            self._follow(line)
            return line
        if line["round"] == 1:
            self._begin(line)
        self._replay(line)
        if self._saved is not None and line["round"] == self._saved_after:
            self._agree_with(self._saved)
        moved = {
            client_id: node_id
            for client_id, node_id in sorted(self._positions.items())
            if before.get(client_id, ROOT) != node_id
        }
        return {
            **line,
            "children": {str(node_id): ids for node_id, ids in self._made.items()},
            "vanished": {str(gone): into for gone, into in sorted(self._vanished.items())},
            "moved": moved,
        }

    def _follow(self, line: JSON) -> None:
        """Apply a record that says itself what changed."""
        for node_id, child_ids in sorted(_by_node(line["children"]).items()):
            self._children[node_id] = list(child_ids)
            self._children |= {child_id: [] for child_id in child_ids}
            self._next_id = max(self._next_id, *(child_id + 1 for child_id in child_ids))
        vanished = _by_node(line["vanished"])
        for node_id in vanished:
            self._children.pop(node_id, None)
        for node_id, child_ids in self._children.items():
            self._children[node_id] = [i for i in child_ids if i in self._children]
        for client_id in line["left"]:
            self._positions.pop(client_id, None)
        self._positions |= dict.fromkeys(line["joined"], ROOT)
        self._positions |= line["moved"]
        for client_id, position in self._positions.items():
            while position in vanished:
                position = vanished[position]
            self._positions[client_id] = position

    def _begin(self, line: JSON) -> None:
        """Make the clusters that were given before the first round, if there were any."""
        found = sum(len(d["groups"]) for d in line["decisions"] if d["verdict"] == "split")
        num_given = max(_by_node(line["cluster_sizes"]), default=0) - found
        if num_given > 0:
            self._split(ROOT, num_given)
        if self._saved is not None and self._saved.root.split_in_round == 0:
            self._home = {i: self._saved.position(i) for i in self._saved.client_ids}

    def _replay(self, line: JSON) -> None:
        """Change nodes and positions as the server did in that round."""
        for client_id in line["left"]:
            self._positions.pop(client_id, None)
        for client_id in line["joined"]:
            self._positions[client_id] = self._home.get(client_id, ROOT)
        self._place({move["client_id"]: move["to_node"] for move in line["routed"]})
        for decision in line["decisions"]:
            node_id = decision["node_id"]
            if decision["verdict"] == "split" and self._children.get(node_id) == []:
                child_ids = self._split(node_id, len(decision["groups"]))
                for child_id, client_ids in zip(child_ids, decision["groups"], strict=True):
                    self._positions |= dict.fromkeys(client_ids, child_id)
        for decision in line["decisions"]:
            if decision["verdict"] == "merge":
                self._merge(decision["node_id"])
            self._place(decision["moves"])

    def _place(self, places: Mapping[str, int]) -> None:
        self._positions |= {
            i: node_id for i, node_id in places.items() if node_id in self._children
        }

    def _split(self, node_id: int, num_groups: int) -> Sequence[int]:
        # The server numbers its nodes upwards and uses no number twice.
        child_ids = list(range(self._next_id, self._next_id + num_groups))
        self._next_id += num_groups
        self._children |= {child_id: [] for child_id in child_ids}
        self._children[node_id] = self._made[node_id] = child_ids
        return child_ids

    def _merge(self, node_id: int) -> None:
        below = list(self._children.get(node_id, []))
        for child_id in below:  # grows while it is walked over
            below.extend(self._children[child_id])
        for client_id, position in self._positions.items():
            if position in below:
                self._positions[client_id] = node_id
        for child_id in below:
            del self._children[child_id]
        self._vanished |= dict.fromkeys(below, node_id)
        if below:
            self._children[node_id] = []

    def _agree_with(self, tree: ParameterTree) -> None:
        """Take nodes and positions from the saved tree, which knows what no record names."""
        present = {node.id for node in tree}
        # Where their clients stand is in `moved`, so that the root is as good as any node.
        self._vanished |= {gone: ROOT for gone in self._children if gone not in present}
        for node in tree:
            if node.child_ids and self._children.get(node.id) != list(node.child_ids):
                self._made[node.id] = list(node.child_ids)
        self._children = {node.id: list(node.child_ids) for node in tree}
        self._positions = {i: tree.position(i) for i in tree.client_ids}
        self._next_id = max(self._next_id, *(node_id + 1 for node_id in self._children))


def _by_node(table: Mapping[str, Any]) -> dict[int, Any]:
    return {int(node_id): value for node_id, value in table.items()}
