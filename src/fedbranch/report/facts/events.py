"""What happened to clients: who came and went, whose replies were refused, who moved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fedbranch.runs import Round

__all__ = ["comings_and_goings", "natural_order", "news", "refusals"]

MOST_NEWS = 500
MOST_NAMED = 3  # clients in one line of the news
MOST_REFUSALS = 2000
MOST_REFUSALS_PER_CLIENT = 5
LONGEST_REASON = 200  # characters


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Give a key by which names with numbers in them are sorted as people sort them.

    Examples
    --------
    >>> sorted(["c10", "c9", "a"], key=natural_order)
    ['a', 'c9', 'c10']
    """
    parts = re.split(r"([0-9]{1,18})", name)
    return [(0, int(part)) if i % 2 else (1, part) for i, part in enumerate(parts)]


def comings_and_goings(history: Sequence[Round]) -> tuple[dict[str, int], dict[str, int]]:
    """Say when clients joined that were not there from the first round on, and when some left.

    Returns
    -------
    tuple
        Client id -> round, of joining and of leaving. Who came back has not left.
    """
    joined: dict[str, int] = {}
    left: dict[str, int] = {}
    for entry in history:
        for client_id in entry.record.left:
            left[client_id] = entry.record.round
        for client_id in entry.record.joined:
            left.pop(client_id, None)
            if entry.record.round > 1:
                joined[client_id] = entry.record.round
    return joined, left


def refusals(history: Sequence[Round]) -> dict[str, list[list[int | str]]]:
    """Give the last refused replies of every client, as round and reason."""
    told: dict[str, list[list[int | str]]] = {}
    num_told = 0
    for entry in reversed(history):
        for client_id, reason in entry.record.refused.items():
            of_client = told.setdefault(client_id, [])
            if len(of_client) < MOST_REFUSALS_PER_CLIENT and num_told < MOST_REFUSALS:
                of_client.insert(0, [entry.record.round, reason[:LONGEST_REASON]])
                num_told += 1
    return told


def news(history: Sequence[Round], names: Mapping[str, str]) -> list[list[int | str]]:
    """Tell who joined, left or moved, and what was merged, in short lines."""
    lines: list[list[int | str]] = []
    for entry in history:
        record = entry.record
        told = []
        if record.joined and record.round > 1:
            told.append(f"{_named(record.joined, names)} joined")
        if record.left:
            told.append(f"{_named(record.left, names)} left")
        for to_node in sorted({move.to_node for move in record.routed}):
            moved = [move.client_id for move in record.routed if move.to_node == to_node]
            told.append(f"{_named(moved, names)} found the way to node {to_node}")
        for decision in record.decisions:
            if decision.verdict == "merge":
                told.append(f"node {decision.node_id} was merged back")
            for leaf_id in sorted(set(decision.moves.values())):
                moved = sorted(i for i, leaf in decision.moves.items() if leaf == leaf_id)
                told.append(f"{_named(moved, names)} moved to node {leaf_id}")
        lines.extend([record.round, line] for line in told)
    return lines[-MOST_NEWS:]


def _named(client_ids: Sequence[str], names: Mapping[str, str]) -> str:
    if len(client_ids) > MOST_NAMED:
        return f"{len(client_ids):,} clients"
    return ", ".join(names.get(client_id, client_id) for client_id in client_ids)
