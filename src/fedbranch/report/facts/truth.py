"""How well the clusters match the true groups, where those are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedbranch.report.facts.natural_order import natural_order
from fedbranch.report.facts.run import RunFacts
from fedbranch.types import JSON

__all__ = ["adjusted_rand_index", "truth"]

MOST_COUNTS = 5000  # true groups times clusters
BELOW_ONE = 0.9999  # to four digits, the largest index of clusters that differ from the groups


def truth(run: RunFacts, *, most_counts: int = MOST_COUNTS) -> JSON | None:
    """Compare the clusters with the true groups; return None if those are unknown.

    Parameters
    ----------
    run
        The run.
    most_counts
        The largest number of cells of a table that anyone can read. A larger one is left out.
    """
    ari = adjusted_rand_index(run.true_groups, run.leaf_of)
    if ari is None:
        return None
    placed = {i: leaf_id for i, leaf_id in run.leaf_of.items() if i in run.true_groups}
    leaf_ids = run.growth.leaf_ids
    groups = sorted({run.true_groups[i] for i in placed}, key=natural_order)
    if len(groups) * len(leaf_ids) > most_counts:
        groups, leaf_ids = [], []
    count = Counter((run.true_groups[i], leaf_id) for i, leaf_id in placed.items())
    return {
        "ari": ari,
        "groups": groups,
        "leaves": leaf_ids,
        "counts": [[count[group, leaf_id] for leaf_id in leaf_ids] for group in groups],
    }


def adjusted_rand_index(groups: Mapping[str, str], leaf_of: Mapping[str, int]) -> float | None:
    """Return the adjusted Rand index of clusters and groups; None if no client is in both.

    Parameters
    ----------
    groups
        Client id -> its true group, where that is known.
    leaf_of
        Client id -> its cluster. Clients on the way down the tree are absent.
    """
    known = sorted(i for i in leaf_of if i in groups)
    if not known:
        return None
    from sklearn.metrics import adjusted_rand_score  # a second to load

    ari = float(adjusted_rand_score([groups[i] for i in known], [leaf_of[i] for i in known]))
    # One wrong client among many must not round to 1, which says: exactly the groups.
    return 1.0 if ari == 1 else min(float(f"{ari:.4g}"), BELOW_ONE)
