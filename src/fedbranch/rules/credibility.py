"""Claims about losses are checked against the updates that the same clients sent.

An update is, to first order, minus the gradient of its client's loss. If it points away from
where the others go, going with them does not lower that loss; a client that says so
contradicts itself. So a client that wants to keep honest clients from parting has two choices.
If its updates resemble theirs, it does little harm. If they do not, its claim does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import cosine_similarity, take_rows, to_numpy, weighted_mean
from fedbranch.rules.evidence import Evidence

__all__ = ["least_agreement", "opposed_groups", "opposed_moves"]

# Two unrelated directions have a cosine of at most this many standard deviations, which are
# 1 / sqrt(dim) each. In few dimensions that bounds nothing; the sign of the cosine decides there.
UNRELATED_DEVIATIONS = 3
LARGEST_UNRELATED_COSINE = 0.1
BLOCK_BYTES = 2**24  # of updates that are compared at once


def least_agreement(dim: int) -> float:
    """Return the cosine up to which two updates have nothing in common."""
    bound = UNRELATED_DEVIATIONS / math.sqrt(dim)
    return bound if bound <= LARGEST_UNRELATED_COSINE else 0.0


def opposed_groups(evidence: Evidence) -> list[bool]:
    """Find the proposed groups with a mean update that has nothing in common with the others'.

    Clients count alike, whatever weight they claim.

    Returns
    -------
    list
        A boolean for each proposed group.
    """
    row_of = {client_id: row for row, client_id in enumerate(evidence.client_ids)}
    rows = [[row_of[client_id] for client_id in group] for group in evidence.proposal]
    bound = least_agreement(evidence.updates.shape[1])
    means = [_mean(evidence, own) for own in rows]
    numbers = range(len(rows))
    others = [
        _mean(evidence, sorted(row for other in numbers if other != group for row in rows[other]))
        for group in numbers
    ]
    cosines = [
        float(to_numpy(cosine_similarity(own[None, :], other[None, :]))[0, 0])
        for own, other in zip(means, others, strict=True)
    ]
    return [cosine <= bound for cosine in cosines]


def opposed_moves(
    cached: Mapping[int, Mapping[str, NDArray[np.float32]]],
) -> dict[str, frozenset[int]]:
    """Find the branches of a split that each of its clients had nothing in common with.

    Parameters
    ----------
    cached
        Branch -> client id -> its update at the split.

    Returns
    -------
    dict
        Client id -> the other branches that its update points away from.
    """
    means = {branch: _mean_of(own) for branch, own in cached.items() if own}
    opposed: dict[str, set[int]] = {i: set() for own in cached.values() for i in own}
    for branch in means:
        others = [other for other in means if other != branch]
        if not others:
            continue
        bound = least_agreement(len(means[branch]))
        directions = np.stack([means[other] for other in others])
        for client_ids, updates in _in_blocks(cached[branch]):
            cosines = to_numpy(cosine_similarity(updates, directions)).tolist()
            for client_id, row in zip(client_ids, cosines, strict=True):
                opposed[client_id] |= {
                    other for other, cosine in zip(others, row, strict=True) if cosine <= bound
                }
    return {client_id: frozenset(branches) for client_id, branches in opposed.items()}


def _mean_of(updates: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Average updates one after the other: they may be on disk, and exceed the memory."""
    total: NDArray[np.float64] = np.zeros(1)
    for update in updates.values():
        total = total + update.astype(np.float64) / len(updates)
    return total.astype(np.float32)


def _in_blocks(
    updates: Mapping[str, NDArray[np.float32]],
) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
    """Yield updates in blocks: they may be on disk, and exceed the memory."""
    client_ids = list(updates)
    at_once = max(1, BLOCK_BYTES // updates[client_ids[0]].nbytes)
    for first in range(0, len(client_ids), at_once):
        some = client_ids[first : first + at_once]
        yield some, np.stack([updates[client_id] for client_id in some])


def _mean(evidence: Evidence, rows: Sequence[int]) -> NDArray[np.floating]:
    updates = take_rows(evidence.updates, rows)
    return weighted_mean(updates, np.ones(len(rows)))
