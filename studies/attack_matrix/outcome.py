"""What came of a run: accuracy of the honest clients, and which attackers were kept out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

import numpy as np
import torch

import fedbranch as fb
from fedbranch.types import JSON
from studies.attack_matrix.poisoned_data import TRIGGER_LABEL, triggered

__all__ = ["Positions", "backdoor_success", "outcome"]

Positions: TypeAlias = dict[str, int]  # client id -> node id

MAX_LISTED_REASONS = 5


def outcome(
    run: fb.Run,
    positions: Sequence[Mapping[str, int]],
    honest: Mapping[str, fb.ClientData],
    attackers: set[str],
) -> JSON:
    """Measure how well the honest clients do, and how well attackers were kept out.

    An attacker is out while it is in a cluster without honest clients, or its latest reply was
    refused.

    Parameters
    ----------
    run
        The run.
    positions
        Client id -> node id, after each of its rounds.
    honest
        The honest clients.
    attackers
        The ids of the attackers.

    Returns
    -------
    JSON
        None stands for a value that does not exist.

        - ``accuracy``, ``worst_accuracy``: of honest clients under their models.
        - ``recall``: the share of attackers that are out at the end.
        - ``precision``: the share of attackers among all clients that were refused last or are
          outside the main clusters of the honest groups.
        - ``out_by``: the first round by which each attacker had been out once.
        - ``share_out``: the share of the attackers' rounds in which they were out.
        - ``num_honest_refused``: the number of refused replies of honest clients.
    """
    is_refused: dict[str, bool] = {}
    first_out: dict[str, int] = {}
    num_out = num_honest_refused = 0
    out: set[str] = set()
    for entry, where in zip(run.history, positions, strict=True):
        record = entry.record
        is_refused |= dict.fromkeys(record.metrics, False) | dict.fromkeys(record.refused, True)
        num_honest_refused += len(record.refused.keys() & honest.keys())
        with_honest = {where[i] for i in honest}
        out = {i for i in attackers if is_refused.get(i) or where[i] not in with_honest}
        num_out += len(out)
        for client_id in out:
            first_out.setdefault(client_id, record.round)
    at_end = positions[-1]
    main_clusters = _main_clusters(at_end, honest)
    singled_out = [i for i in at_end if is_refused.get(i) or at_end[i] not in main_clusters]
    accuracies = [_accuracy(run, i) for i in honest]
    were_all_out = attackers and len(first_out) == len(attackers)
    return {
        "accuracy": fmean(accuracies),
        "worst_accuracy": min(accuracies),
        "clusters": sorted(map(len, run.clusters.values()), reverse=True),
        "split_in_rounds": [s.round for e in run.history for s in e.record.splits],
        "recall": len(out) / len(attackers) if attackers else None,
        "precision": fmean(i in attackers for i in singled_out) if singled_out else None,
        "out_by": max(first_out.values()) if were_all_out else None,
        "share_out": num_out / len(attackers) / len(run.history) if attackers else None,
        "num_honest_refused": num_honest_refused,
        "reasons": _reasons(run),
    }


def _main_clusters(where: Mapping[str, int], honest: Mapping[str, fb.ClientData]) -> set[int]:
    """Return, for each honest group, the node at which most of its clients are."""
    found = set()
    for group in {client.group for client in honest.values()}:
        places = [where[i] for i in sorted(honest) if honest[i].group == group]
        found.add(max(sorted(set(places)), key=places.count))
    return found


def _accuracy(run: fb.Run, client_id: str) -> float:
    accuracy = run.evaluation[client_id]["accuracy"]
    assert accuracy is not None  # all clients have test data
    return accuracy


def _reasons(run: fb.Run) -> list[str]:
    """Return the first few different reasons for refusals, with the kind of client."""
    found = {
        f"{client_id.split('-')[0]}: {reason}"
        for entry in run.history
        for client_id, reason in entry.record.refused.items()
    }
    return sorted(found)[:MAX_LISTED_REASONS]


def backdoor_success(run: fb.Run, honest: Mapping[str, fb.ClientData]) -> float:
    """Measure how often honest clients' models give the wanted label to images with the trigger."""
    shares = []
    for client_id, client in honest.items():
        assert client.test is not None
        others = client.test.y != TRIGGER_LABEL
        images = torch.from_numpy(triggered(client.test.x[others]))
        with torch.no_grad():
            labels = run.model(client_id)(images).argmax(dim=1).numpy()
        shares.append(float(np.mean(labels == TRIGGER_LABEL)))
    return fmean(shares)
