"""The clients of a run as columns: where each ended, what it reached, when it came and left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbranch.report.facts.folding import numbers
from fedbranch.report.facts.metrics import latest
from fedbranch.report.facts.run import RunFacts
from fedbranch.runs import Round
from fedbranch.types import JSON

__all__ = ["clients", "joined_and_left", "plain_last"]

MOST_REFUSALS = 2000
MOST_REFUSALS_PER_CLIENT = 5
LONGEST_REASON = 200  # characters


def clients(run: RunFacts) -> JSON:
    """Return one column for each thing that is known of clients, in the order of their ids."""
    ids = run.all_client_ids
    described = {str(client["id"]): client for client in run.about["clients"]}
    joined, left = joined_and_left(run.history)
    refused, reasons = run.refused, _refusals(run.history)
    plain = plain_last(run)
    return {
        "ids": ids,
        "names": [run.names.get(i) for i in ids],
        "leaf": [run.growth.positions.get(i) for i in ids],
        "examples": [described.get(i, {}).get("num_train") for i in ids],
        "group": [run.true_groups.get(i) for i in ids],
        "joined": [joined.get(i) for i in ids],
        "left": [left.get(i) for i in ids],
        "refused": [refused[i] for i in ids],
        "refusals": [reasons.get(i, []) for i in ids],
        "last": _columns(run.last, ids),
        "plain": None if plain is None else _columns(plain, ids),
    }


def joined_and_left(history: Sequence[Round]) -> tuple[dict[str, int], dict[str, int]]:
    """Return when clients joined after the first round, and when clients left for good.

    Returns
    -------
    tuple
        Client id -> round of joining, and client id -> round of leaving. A client that came
        back is not in the second one.
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


def plain_last(run: RunFacts) -> dict[str, dict[str, float]] | None:
    """Return the last values under plain FL: metric -> client id -> value.

    None if plain FL was not run or is not complete: half a run is no measure for an end.
    """
    plain = run.baselines.get("fedavg")
    if plain is None or not plain.folder.is_complete:
        return None
    values = latest(plain.history, run.metrics, in_training=run.in_training)
    return values if any(values.values()) else None


def _columns(values: Mapping[str, Mapping[str, float]], client_ids: Sequence[str]) -> JSON:
    return {
        name: numbers(by_client.get(i) for i in client_ids) for name, by_client in values.items()
    }


def _refusals(history: Sequence[Round]) -> dict[str, list[list[int | str]]]:
    """Return the last refused replies of every client, as round and reason."""
    reasons: dict[str, list[list[int | str]]] = {}
    num_kept = 0
    for entry in reversed(history):
        for client_id, reason in entry.record.refused.items():
            of_client = reasons.setdefault(client_id, [])
            if len(of_client) < MOST_REFUSALS_PER_CLIENT and num_kept < MOST_REFUSALS:
                of_client.insert(0, [entry.record.round, reason[:LONGEST_REASON]])
                num_kept += 1
    return reasons
