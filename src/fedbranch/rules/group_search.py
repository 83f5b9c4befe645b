"""Which groups a leaf's clients form: by half updates, or without them by similarities alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import take_rows
from fedbranch.core.groups import compared_halves, find_structure
from fedbranch.core.linkage import bipartition, separation_gap
from fedbranch.core.row_sampling import some_rows
from fedbranch.rules.draft import Draft
from fedbranch.rules.evidence import Decision, Groups
from fedbranch.rules.gap_test import least_gap, widest_gap

__all__ = ["FoundGroups", "groups_by_gap", "groups_by_halves", "sizes_in_words"]

# Every two clients are compared; of more than these a sample is drawn, and the others are routed.
MOST_COMPARED = 5000
# Updates that have shrunk below this share of their initial length may differ by noise alone.
LEAST_LENGTH_LEFT = 0.3


class FoundGroups(NamedTuple):
    """Groups that a split is worth considering for.

    Attributes
    ----------
    groups
        Client ids of each group.
    what, why
        Their number and sizes, and what speaks for them, in words.
    """

    groups: Groups
    what: str
    why: str


def groups_by_halves(draft: Draft) -> FoundGroups | Decision:
    """Find groups that are more than noise by the clients' half updates.

    Clients without half updates are routed, like those that have not answered.

    Returns
    -------
    FoundGroups | Decision
        The decision to train if there are none.
    """
    evidence = draft.evidence
    assert evidence.half_differences is not None
    places = some_rows(len(evidence.halved_rows), MOST_COMPARED, evidence.node_id, evidence.round)
    rows = [evidence.halved_rows[place] for place in places.tolist()]
    updates, half_differences = evidence.updates, evidence.half_differences
    if evidence.whole is not None and evidence.whole_half_differences is not None:
        # Sketches add an error of their own, and a small one can hide groups or pretend them.
        updates, half_differences = evidence.whole, evidence.whole_half_differences
    halves = compared_halves(take_rows(updates, rows), take_rows(half_differences, places.tolist()))
    found = find_structure(halves)
    draft.measured |= {"noise": halves.noise, "num_halved": len(rows)}
    if found is None:
        return draft.train("no groups: all updates are equally similar")
    draft.measured |= {
        "num_groups": found.num_groups,
        "scatter": found.scatter,
        "loosest_scatter": found.loosest_scatter,
        "p_structure": found.p_value,
        "p_structure_needed": found.level,
        "num_misplaced": found.num_misplaced,
        # Nothing is decided by these two, but they are what the paper draws.
        "cross_similarity": bipartition(halves.similarity).cross_similarity,
        "separation_gap": separation_gap(halves.similarity, found.groups.tolist()),
    }
    what = _what(found.groups, found.num_groups)
    if not found.is_clear:
        return draft.train(f"no groups: of the best cut, into {what}, {found.doubt}")
    return FoundGroups(
        _grouped(
            {
                evidence.client_ids[row]: int(group)
                for row, group, is_misplaced in zip(
                    rows, found.groups, found.misplaced, strict=True
                )
                if not is_misplaced
            }
        ),
        what,
        f"differences within them are {max(found.scatter, 0):.0%} of those between them, and the "
        f"other half of the data confirms them (p = {found.p_value:.1g})",
    )


def groups_by_gap(draft: Draft) -> FoundGroups | Decision:
    """Find groups by the widest gap between similarities, for clients without half updates.

    Returns
    -------
    FoundGroups | Decision
        The decision to train if there are none.
    """
    evidence = draft.evidence
    num_clients = len(evidence.client_ids)
    merges, num_groups, gap = widest_gap(evidence)
    groups = merges.groups(num_groups)
    draft.measured |= {"num_groups": num_groups, "gap": gap}
    what = _what(groups, num_groups)
    halves = f"{len(evidence.halved_rows)} of {num_clients} clients sent half updates"
    lengths = [entry.norm for entry in evidence.past] or [1.0]
    length_left = lengths[-1] / lengths[0] if lengths[0] else 1.0
    draft.measured["length_left"] = length_left
    if length_left < LEAST_LENGTH_LEFT:
        return draft.train(
            f"converged: updates have shrunk to {length_left:.0%} of their initial length, so "
            f"remaining differences may be noise ({halves})"
        )
    least = least_gap(evidence)
    if gap < least:
        return draft.train(
            f"no groups: the widest gap between similarities, for {what}, is {gap:.2f}, less than "
            f"{least:.2g} ({halves})"
        )
    return FoundGroups(
        _grouped(dict(zip(evidence.client_ids, map(int, groups), strict=True))),
        what,
        f"a gap of {gap:.2f} between similarities ({halves})",
    )


def sizes_in_words(groups: Groups) -> str:
    """Describe groups by their number and sizes.

    Examples
    --------
    >>> sizes_in_words((("a",), ("b", "c")))
    '2 groups of 2 + 1'
    """
    return _in_words(len(groups), [len(group) for group in groups])


def _what(groups: NDArray[np.intp], num_groups: int) -> str:
    return _in_words(num_groups, np.bincount(groups).tolist())


def _in_words(num_groups: int, sizes: list[int]) -> str:
    return f"{num_groups} groups of {' + '.join(str(size) for size in sorted(sizes, reverse=True))}"


def _grouped(group_of: Mapping[str, int]) -> Groups:
    """List the clients of each group, in the order of the groups' numbers."""
    members: dict[int, list[str]] = {}
    for client_id, group in group_of.items():
        members.setdefault(group, []).append(client_id)
    return tuple(tuple(members[group]) for group in sorted(members))
