"""Groups by the gap between similarities, for clients that cannot send half updates.

Nothing then separates signal from noise. Between groups, single linkage must show a gap that no
federation without conflicts has shown; a wider one still if clients cannot measure losses either.
"""

from __future__ import annotations

from functools import partial

from fedbranch.core.blocked_linkage import hierarchy_of
from fedbranch.core.exact_cut import are_edges_right, cosines_of_pairs, likely_error
from fedbranch.core.linkage import Hierarchy
from fedbranch.rules.evidence import Evidence

__all__ = ["best_hierarchy", "gap_between", "least_gap", "widest_gap"]

LEAST_GAP = 0.2
LEAST_GAP_WITHOUT_LOSSES = 0.4
# Sketches may pretend a gap of this many typical errors of a cosine.
ERRORS_IN_A_GAP = 2


def widest_gap(evidence: Evidence) -> tuple[Hierarchy, int, float]:
    """Find the number of groups below which single linkage has its widest gap.

    Where sketches leave open whether a gap is wide enough, updates in full decide, if the server
    keeps them.

    Returns
    -------
    tuple
        Single linkage, the number of groups, and the gap.
    """
    found = _widest(hierarchy_of(evidence.updates), evidence)
    if _may_hide_a_gap(found[0], found[2], evidence):
        found = _widest(best_hierarchy(evidence), evidence)
    return found


def _may_hide_a_gap(merges: Hierarchy, gap: float, evidence: Evidence) -> bool:
    """Return whether updates in full, if they are kept, may show a gap that is wide enough.

    If no similarity is off by more than the error, no height of single linkage is either.
    """
    if evidence.whole is None or evidence.projection is None:
        return False
    error = likely_error(evidence.projection, merges.num_clients)
    if gap >= LEAST_GAP - 2 * error:
        return True
    return not are_edges_right(merges, error, partial(cosines_of_pairs, evidence.whole))


def _widest(merges: Hierarchy, evidence: Evidence) -> tuple[Hierarchy, int, float]:
    most_groups = max(2, len(evidence.client_ids) // 2)
    gaps = {number: gap_between(merges, number) for number in range(2, most_groups + 1)}
    num_groups = max(gaps, key=gaps.__getitem__)
    return merges, num_groups, gaps[num_groups]


def best_hierarchy(evidence: Evidence) -> Hierarchy:
    """Compute single linkage of the updates in full, or of sketches where only these are kept."""
    return hierarchy_of(evidence.updates if evidence.whole is None else evidence.whole)


def gap_between(merges: Hierarchy, num_groups: int) -> float:
    """Compute how much less similar the groups are than the clients joined last within them."""
    heights = merges.similarities  # [-j] is where the last of j + 1 groups join
    return float(heights[-num_groups] - heights[1 - num_groups])


def least_gap(evidence: Evidence, *, has_losses: bool = True) -> float:
    """Return how wide a gap must be: wider where only sketches are kept, and without losses."""
    least = LEAST_GAP if has_losses else LEAST_GAP_WITHOUT_LOSSES
    return least if evidence.whole is not None else least + _gap_of_sketches(evidence)


def _gap_of_sketches(evidence: Evidence) -> float:
    if evidence.projection is None:
        return 0.0
    return ERRORS_IN_A_GAP * evidence.projection.typical_error()
