"""Short lines about clients that joined, left or moved, and about merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbranch.runs import Round
from fedbranch.server.records import RoundRecord

__all__ = ["news"]

MOST_NEWS = 500
MOST_NAMED = 3  # clients in one line


def news(history: Sequence[Round], names: Mapping[str, str]) -> list[list[int | str]]:
    """Return the last lines, each with its round.

    Parameters
    ----------
    history
        All rounds.
    names
        Client id -> what people call it, where they call it something else.
    """
    lines: list[list[int | str]] = []
    for entry in history:
        lines.extend([entry.record.round, line] for line in _lines(entry.record, names))
    return lines[-MOST_NEWS:]


def _lines(record: RoundRecord, names: Mapping[str, str]) -> list[str]:
    lines = []
    if record.joined and record.round > 1:
        lines.append(f"{_named(record.joined, names)} joined")
    if record.left:
        lines.append(f"{_named(record.left, names)} left")
    for to_node in sorted({move.to_node for move in record.routed}):
        moved = [move.client_id for move in record.routed if move.to_node == to_node]
        lines.append(f"{_named(moved, names)} found the way to node {to_node}")
    for decision in record.decisions:
        if decision.verdict == "merge":
            lines.append(f"node {decision.node_id} was merged back")
        for leaf_id in sorted(set(decision.moves.values())):
            moved = sorted(i for i, leaf in decision.moves.items() if leaf == leaf_id)
            lines.append(f"{_named(moved, names)} moved to node {leaf_id}")
    return lines


def _named(client_ids: Sequence[str], names: Mapping[str, str]) -> str:
    if len(client_ids) > MOST_NAMED:
        return f"{len(client_ids):,} clients"
    return ", ".join(names.get(client_id, client_id) for client_id in client_ids)
