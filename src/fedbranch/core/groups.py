"""Groups among updates: how many there are, and whether they are more than sampling noise.

Every client computes two updates a, b from two random halves of its data. With v = (a + b) / 2
and h = (a - b) / 2, the length of h estimates the noise of v, and ``|v|² - |h|² = <a, b>`` its
signal (the paper's γ_i is their ratio). So similarities can be corrected for noise, and groups
that are found in one half can be tested in the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from scipy.stats import t as student_t

from fedbranch.core.geometry import cosine_similarity, norms, to_numpy
from fedbranch.types import Array

__all__ = ["Halves", "Structure", "compared_halves", "find_structure"]

MOST_GROUPS = 20
# One in this many clients may be misplaced: among many clients there always is one.
CLIENTS_PER_MISPLACED = 50
LEAST_LEVEL = 1e-8  # of a p-value
# A smaller reliability cannot be told from zero; dividing by it would amplify noise.
LEAST_RELIABILITY = 0.02


@dataclass(frozen=True, eq=False)
class Halves:
    """The comparisons of clients: cosines of whole updates, and across halves.

    Attributes
    ----------
    similarity
        Shape (m, m): cosine similarities of the whole updates v.
    across
        Shape (m, m): cosine similarities of a_i and b_j.
    reliability
        Shape (m,): the share of signal in an update's squared length, ``<a, b> / |v|²``.
    """

    similarity: NDArray[np.float64]
    across: NDArray[np.float64]
    reliability: NDArray[np.float64]

    @property
    def noise(self) -> float:
        """The paper's γ of a typical client: noise divided by signal; infinite without signal."""
        reliability = float(np.median(self.reliability))
        return math.sqrt((1 - reliability) / reliability) if reliability > 0 else math.inf


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """A grouping of clients, and the measures of how clear it is.

    Attributes
    ----------
    groups
        Shape (m,): the group of each row, numbered in the order of their first rows.
    scatter
        Distance between clients of one group, divided by that between clients of different
        groups, both corrected for noise. 0: a group's clients agree; 1: any other grouping
        would be as good.
    loosest_scatter
        The same for the group that agrees least.
    p_value
        For the two groups that differ least: the probability of their difference if they were
        the same. It is measured in one half of the data, along the direction in the other.
    level
        The level that the p-value was compared with.
    misplaced
        Shape (m,): true for clients that are, across halves, more similar to another group.
    limits
        The largest ``scatter`` and ``loosest_scatter`` of clear groups.
    """

    groups: NDArray[np.intp]
    scatter: float
    loosest_scatter: float
    p_value: float
    level: float
    misplaced: NDArray[np.bool_]
    limits: tuple[float, float] = field(default=(0.25, 0.5))

    @property
    def num_groups(self) -> int:
        """Count of groups."""
        return int(self.groups.max()) + 1

    @property
    def num_misplaced(self) -> int:
        """Count of misplaced clients."""
        return int(self.misplaced.sum())

    @property
    def is_clear(self) -> bool:
        """Return whether these are groups, and not just one of many possible cuts."""
        return not self.doubt

    @property
    def doubt(self) -> str:
        """The reason against these groups; empty if there is none."""
        most, most_in_one = self.limits
        if math.isinf(self.scatter):
            return "groups do not differ more than noise"
        if self.scatter > most:
            return f"clients within a group differ by {self.scatter:.0%} of what groups differ by"
        if self.loosest_scatter > most_in_one:
            return f"clients of one group differ by {self.loosest_scatter:.0%} of what groups differ by"
        if self.p_value > self.level:
            return (
                f"in the other half of the data the groups differ with p = {self.p_value:.1g} only, "
                f"not below {self.level:.1g}"
            )
        if self.num_misplaced > len(self.groups) // CLIENTS_PER_MISPLACED:
            return f"{self.num_misplaced} client(s) are nearer to another group in the other half"
        return ""


def compared_halves(updates: Array, half_differences: Array) -> Halves:
    """Compare clients by whole updates and across halves.

    Parameters
    ----------
    updates, half_differences
        Shape (m, dim): v = (a + b) / 2 and h = (a - b) / 2 of every client.
    """
    signal = to_numpy(norms(updates)) ** 2 - to_numpy(norms(half_differences)) ** 2
    squared = np.maximum(to_numpy(norms(updates)) ** 2, np.finfo(np.float64).tiny)
    across = cosine_similarity(updates + half_differences, updates - half_differences)
    return Halves(
        similarity=to_numpy(cosine_similarity(updates)).astype(np.float64),
        across=to_numpy(across).astype(np.float64),
        reliability=signal / squared,
    )


def find_structure(halves: Halves) -> Structure | None:
    """Find the finest grouping that is clear, or else the one nearest to being clear.

    Groupings are cuts of the average-linkage hierarchy of the similarities. Single linkage,
    which gives the paper's optimal bipartition, follows chains of noisy clients. The average
    over two groups does not, and without noise both give the same groups.

    Returns
    -------
    Structure or None
        None if there are fewer than three clients, which are too few to tell groups from
        noise, or if all are equally similar.

    Notes
    -----
    The groups were chosen to look different, and m clients can be cut in two in about
    2**(m - 1) ways. So the level that the p-value must stay below falls with m. Up to nine
    clients it is 1 % divided by the number of ways (Bonferroni). For more clients that is
    needlessly strict, because the choice is made on the whole updates, and each half has only
    a part of these. There the level falls as 2**(-m / 4), down to 1e-8; no federation without
    groups has come near that.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> centres = np.repeat(rng.normal(size=(2, 50)), 5, axis=0)
    >>> a, b = (centres + 0.5 * rng.normal(size=(10, 50)) for _ in range(2))
    >>> found = find_structure(compared_halves((a + b) / 2, (a - b) / 2))
    >>> found.groups.tolist(), found.is_clear
    ([0, 0, 0, 0, 0, 1, 1, 1, 1, 1], True)
    """
    num_clients = len(halves.similarity)
    if num_clients < 3:
        return None
    found = [
        _judged(halves, groups)
        for groups in _groupings(halves.similarity, min(max(2, num_clients // 2), MOST_GROUPS))
    ]
    clear = [structure for structure in found if structure.is_clear]
    if clear:
        return clear[-1]
    # The grouping nearest to being clear, for the reason that people read.
    in_groups = [structure for structure in found if structure.scatter <= structure.limits[0]]
    if in_groups:
        return min(in_groups, key=lambda structure: structure.p_value)
    return min(found, key=lambda structure: structure.scatter, default=None)


def _groupings(similarity: NDArray[np.float64], most: int) -> list[NDArray[np.intp]]:
    """Cut the average-linkage hierarchy into 2, 3, ... groups."""
    distance = np.maximum(0.0, 1 - (similarity + similarity.T) / 2)
    np.fill_diagonal(distance, 0.0)
    merges = linkage(squareform(distance, checks=False), "average")
    cuts = []
    for num_groups in range(2, most + 1):
        numbers = fcluster(merges, num_groups, "maxclust")
        _, first_rows, groups = np.unique(numbers, return_index=True, return_inverse=True)
        if len(first_rows) == num_groups:  # there are fewer if several merges are equally far
            order = np.argsort(np.argsort(first_rows))
            cuts.append(order[groups].astype(np.intp))
    return cuts


def _judged(halves: Halves, groups: NDArray[np.intp]) -> Structure:
    num_clients = len(groups)
    scatter, loosest = _scatter(halves, groups)
    return Structure(
        groups=groups,
        scatter=scatter,
        loosest_scatter=loosest,
        p_value=max(_largest_p_value(half, groups) for half in (halves.across, halves.across.T)),
        level=_level(num_clients),
        misplaced=_misplaced(halves.across, groups),
    )


def _level(num_clients: int) -> float:
    num_others = min(num_clients - 1, 1000)
    bonferroni = 1e-2 * math.pow(2, -num_others)
    return max(bonferroni, 1e-4 * math.pow(2, -num_others / 4), LEAST_LEVEL)


def _scatter(halves: Halves, groups: NDArray[np.intp]) -> tuple[float, float]:
    """Compare disagreement within groups, overall and in the worst, with that between them."""
    # Spearman's correction: a cosine between noisy vectors is that of their signals times the
    # square roots of both reliabilities. Sums are divided, not single cosines, so that a
    # client of hardly any signal does not count for more than others.
    roots = np.sqrt(np.clip(halves.reliability, LEAST_RELIABILITY, 1.0))
    members = _members(groups)
    # Sums over all pairs of a client of one group and a client of another, (group, group); and
    # within each group, where no client is a pair with itself.
    similar = members.T @ halves.similarity @ members
    attainable = np.outer(members.T @ roots, members.T @ roots)
    similar_within = np.diag(similar) - members.T @ np.diag(halves.similarity)
    attainable_within = np.diag(attainable) - members.T @ roots**2
    is_other = ~np.eye(len(similar), dtype=bool)
    between = 1 - float(similar[is_other].sum() / attainable[is_other].sum())
    has_pairs = members.sum(axis=0) > 1
    # Corrected for noise, groups do not differ; or every client is its own group.
    if between <= 0 or not has_pairs.any():
        return math.inf, math.inf
    numerators, denominators = similar_within[has_pairs], attainable_within[has_pairs]
    within = 1 - float(numerators.sum() / denominators.sum())
    loosest = 1 - float((numerators / denominators).min())
    return within / between, loosest / between


def _largest_p_value(across: NDArray[np.float64], groups: NDArray[np.intp]) -> float:
    """Test whether every two groups differ in one half along the direction seen in the other.

    The direction leads from one group's mean to the other's, as the columns' half shows them;
    the rows' halves are projected on it. Student's t of two samples, with the variance of all
    groups pooled.
    """
    num_clients, num_groups = len(groups), int(groups.max()) + 1
    freedom = num_clients - num_groups
    counts = np.bincount(groups).astype(np.float64)
    means = _members(groups) / counts[None, :]
    onto = across @ means  # of row i's half onto the mean of each group's other half
    along = onto[:, :, None] - onto[:, None, :]
    of_group = np.einsum("ig,ipq->gpq", means, along)
    variance = ((along - of_group[groups]) ** 2).sum(axis=0) / freedom
    first, second = np.tril_indices(num_groups, -1)
    difference = of_group[first, first, second] - of_group[second, first, second]
    error = np.sqrt(variance[first, second] * (1 / counts[first] + 1 / counts[second]))
    with np.errstate(over="ignore"):  # where nothing varies
        statistic = difference / np.maximum(error, np.finfo(np.float64).tiny)
    return float(student_t.sf(statistic.min(), freedom))


def _misplaced(across: NDArray[np.float64], groups: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Find the clients that are, across halves and on average, nearer to another group."""
    members = _members(groups)
    both = (across @ members + across.T @ members) / 2
    itself = np.diag(across)[:, None] * members
    others = members.sum(axis=0)[None, :] - members
    # A client does not count for its own group, unless it is alone there: then its two halves do.
    alone = others == 0
    nearness = np.where(alone, itself, (both - itself) / np.maximum(others, 1))
    rows = np.arange(len(groups))
    own = nearness[rows, groups].copy()
    nearness[rows, groups] = -np.inf
    misplaced: NDArray[np.bool_] = own <= nearness.max(axis=1)
    return misplaced


def _members(groups: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the membership of clients in groups: shape (m, num_groups), ones and zeros."""
    is_member: NDArray[np.bool_] = groups[:, None] == np.arange(groups.max() + 1)[None, :]
    return is_member.astype(np.float64)
