"""What happened in a round: decisions, refusals, and the clients that moved, came and left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from fedbranch.rules import Decision
from fedbranch.types import JSON

__all__ = ["RoundRecord", "Routing"]

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A client's step down the tree, with its similarity to each side."""

    client_id: str
    from_node: int
    to_node: int
    similarities: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """Everything that happened in a round.

    Attributes
    ----------
    round
        Counted from 1.
    decisions
        One for each examined cluster.
    refused
        Client id -> why its reply was not used.
    routed
        The clients that moved down the tree.
    joined, left
        Client ids that were new in this round, or removed before it.
    cluster_sizes
        Leaf -> number of clients after the round.
    children
        Node -> ids of the leaves that it was split into, in the order of the decision's groups;
        in round 1 also those of clusters that were given.
    moved
        Client id -> the node to which it was moved: every client that was routed, split off or
        placed, or that joined elsewhere than at the root.
    vanished
        Node that is gone because a split was merged or undone -> the node at which its clients
        stand now, if that has not vanished itself.
    metrics
        Client id -> what it reported. Not-finite values are None.
    """

    round: int
    decisions: tuple[Decision, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    routed: tuple[Routing, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    cluster_sizes: Mapping[int, int] = field(default_factory=dict)
    children: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    vanished: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @property
    def splits(self) -> tuple[Decision, ...]:
        """The decisions that split a cluster."""
        return tuple(decision for decision in self.decisions if decision.verdict == "split")

    def to_json(self) -> JSON:
        """Return the record as JSON, without measurements that are not finite."""
        table = asdict(self)
        for decision in table["decisions"]:
            measured = decision["measurements"].items()
            decision["measurements"] = {n: v for n, v in measured if math.isfinite(v)}
        return table

    @classmethod
    def from_json(cls, line: JSON) -> RoundRecord:
        """Rebuild a record from what :meth:`to_json` gave, also after JSON made strings of keys."""
        return cls(
            round=line["round"],
            decisions=tuple(
                Decision(**{**entry, "groups": tuple(tuple(ids) for ids in entry["groups"])})
                for entry in line["decisions"]
            ),
            refused=dict(line["refused"].items()),
            routed=tuple(
                Routing(**{**entry, "similarities": _by_node(entry["similarities"])})
                for entry in line["routed"]
            ),
            joined=tuple(line["joined"]),
            left=tuple(line["left"]),
            cluster_sizes=_by_node(line["cluster_sizes"]),
            children={
                node_id: tuple(child_ids)
                for node_id, child_ids in _by_node(line["children"]).items()
            },
            moved=dict(line["moved"].items()),
            vanished=_by_node(line["vanished"]),
            metrics=dict(line["metrics"].items()),
        )


def _by_node(table: Mapping[str, V]) -> dict[int, V]:
    return {int(node_id): value for node_id, value in table.items()}
