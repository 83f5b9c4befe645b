"""What the server does against clients that work against the others.

A reply that no honest client sends is set aside before anything is averaged, compared or
examined; and no client, however it behaves, gets more than its share of the weight, of the
clusters, or of the newcomers.

What this cannot see: clients that send what honest ones would send, such as a copy of
another's update, or a lie that is smaller than the differences between honest clients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.geometry import cosine_similarity, norms, take_rows, to_numpy, weighted_mean
from fedbranch.core.products import column_blocks
from fedbranch.core.row_sampling import some_rows
from fedbranch.server.replies.reply import Reply, stacked
from fedbranch.types import Array

__all__ = ["DEFAULT_GUARD", "Guard", "capped_weights"]

# With fewer replies nobody can say what is usual.
REPLIES_TO_COMPARE = 5
FEWEST_TO_COMPARE = 3  # but enough to tell whether one who was set aside may come back
REPLIES_TO_CAP = 3  # of two clients one may well have most of the examples
# How probable it may be that isotropic noise resembles somebody by chance, in a round.
CHANCE = 0.05
# How much more most others must resemble each other, for a stranger to be one; and a stranger
# somebody, to come back.
CLEARLY = 3
# Where the mean is longer than most updates the longest ones balance nothing, but drag all others
# along; then so many times the usual length is too long, unless it comes from a client with as
# many times the usual data.
LENGTH_OF_DRAGGING = 5.0
# By so many numbers of each update, compared with so many others, one sees who may be a stranger.
NUMBERS_AT_FIRST = 8192
OTHERS_AT_FIRST = 100
NUMBERS_AT_ONCE = 2**24  # similarities of those who resemble none of these
# Below, resembling nobody means something: in few dimensions everybody resembles somebody.
WIDEST_BOUND = 0.3


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Limits that honest clients do not come near to.

    Parameters
    ----------
    max_length
        A reply whose update (or signal, or buffers) is longer than so many times the median of
        its cluster is set aside. Where few clients pull against many, one of n + 1 may honestly
        be n times as long when the cluster has come to rest; so keep it above that. While the
        mean is longer than most updates, 5 times is too long, or as many times more as the
        client has more examples; who was set aside comes back when it is shorter. None: any.
    clipped_length
        In means an update counts with at most so many times the median length of its cluster;
        compared it is as it came. None: with its own.
    sets_strangers_aside
        Set replies aside that resemble nobody's, less than noise would by chance, while most
        others resemble each other. Who was set aside comes back when it resembles somebody.
    max_share
        The largest share of a cluster's weight that one client can have, where at least three
        have answered: whoever claims more examples counts for that. None: any.
    max_clusters
        No split makes more clusters than this. None: any number.
    ignored_share
        A newcomer goes where the most similar of the updates cached on an edge is, as in the
        paper, but of each edge this share of them, the most similar ones, does not count: so
        many poisoned ones cannot attract it. At most 0.5.
    num_best
        And what decides is the mean over so many of those that count, the most similar ones: an
        edge with so few updates that a share of them is none is then safe from one as well.
        With 1 the largest, as in the paper.

    Examples
    --------
    >>> Guard().max_clusters
    100
    """

    max_length: float | None = 25.0
    clipped_length: float | None = 4.0
    sets_strangers_aside: bool = True
    max_share: float | None = 0.5
    max_clusters: int | None = 100
    ignored_share: float = 0.1
    num_best: int = 4

    def __post_init__(self) -> None:
        for name in ("max_length", "clipped_length", "max_share", "ignored_share"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        object.__setattr__(self, "num_best", operator.index(self.num_best))
        if self.max_clusters is not None:
            object.__setattr__(self, "max_clusters", operator.index(self.max_clusters))
        if not isinstance(self.sets_strangers_aside, bool):
            raise TypeError(
                f"sets_strangers_aside is {self.sets_strangers_aside!r}; it must be True or False"
            )
        for name, allowed, is_allowed in [
            ("max_length", "above 1", self.max_length is None or self.max_length > 1),
            (
                "clipped_length",
                "at least 1",
                self.clipped_length is None or self.clipped_length >= 1,
            ),
            ("max_share", "in (0, 1]", self.max_share is None or 0 < self.max_share <= 1),
            ("max_clusters", "at least 1", self.max_clusters is None or self.max_clusters >= 1),
            ("ignored_share", "in [0, 0.5]", 0 <= self.ignored_share <= 0.5),
            ("num_best", "at least 1", self.num_best >= 1),
        ]:
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    def weights(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give what clients that claim so many examples count for, shape (n,)."""
        if self.max_share is None or len(counts) < REPLIES_TO_CAP:
            return counts
        return capped_weights(counts, self.max_share)

    def clipped(self, updates: Array, lengths: NDArray[np.float64] | None = None) -> Array:
        """Shorten the updates, shape (n, dim), that are longer than they may count for.

        Their lengths, shape (n,), need not be measured again where they are known.
        """
        if self.clipped_length is None or len(updates) < REPLIES_TO_COMPARE:
            return updates
        if lengths is None:
            lengths = to_numpy(norms(updates))
        longest = self.clipped_length * float(np.median(lengths))
        if longest == 0 or lengths.max() <= longest:
            return updates
        factors = np.minimum(1.0, longest / np.maximum(lengths, longest)).astype(np.float32)
        xp = array_namespace(updates)
        shortened: Array = updates * xp.asarray(factors, device=device(updates))[:, None]
        return shortened

    def set_aside(
        self, replies: Mapping[str, Reply], already: Collection[str] = ()
    ) -> dict[str, str]:
        """Find the replies of a cluster that cannot be those of honest clients.

        Parameters
        ----------
        replies
            Client id -> reply, all computed at the same parameters.
        already
            Clients that were set aside when they last replied.

        Returns
        -------
        dict
            Client id -> why.
        """
        ids = sorted(replies)
        was_aside = np.array([client_id in already for client_id in ids])
        if len(ids) < (FEWEST_TO_COMPARE if was_aside.any() else REPLIES_TO_COMPARE):
            return {}
        ordered = [replies[client_id] for client_id in ids]
        vectors = compared = stacked(ordered, "vector")
        judged = {"update": vectors, "buffers": stacked(ordered, "buffers")}
        if not all(reply.rows.compares_update for reply in ordered):
            judged["signal"] = compared = stacked(ordered, "whole")
        found: dict[str, str] = {}
        if self.max_length is not None:
            counts = np.array([reply.weight for reply in ordered])
            # Those who were set aside do not say what is usual, however many have come together.
            is_usual = ~was_aside if not was_aside.all() else was_aside
            for name, rows in judged.items():
                lengths = to_numpy(norms(rows)) if rows.shape[1] else np.zeros(len(ids))
                usual = float(np.median(lengths[is_usual]))
                limits = np.full(len(ids), self.max_length)
                if name != "buffers" and lengths.max() > LENGTH_OF_DRAGGING * usual:
                    more_data = np.maximum(counts / np.median(counts[is_usual]), 1.0)
                    stricter = np.minimum(LENGTH_OF_DRAGGING * more_data, self.max_length)
                    mean = weighted_mean(rows, np.ones(len(ids)))
                    drags = float(norms(mean[None, :])[0]) > usual
                    limits = np.where(was_aside | drags, stricter, limits)
                found = _too_long(ids, lengths, usual, limits, name) | found
        if self.sets_strangers_aside:
            found = _strangers(ids, compared, was_aside) | found
        return found

    def strangers(
        self, replies: Mapping[str, Reply], already: Collection[str] = ()
    ) -> dict[str, str]:
        """Find the replies that resemble nobody's by what is compared of them: client id -> why.

        For replies of which no more is left: how long they may be, :meth:`too_long` has said.
        """
        ids = sorted(replies)
        was_aside = np.array([client_id in already for client_id in ids])
        if not self.sets_strangers_aside or len(ids) < (
            FEWEST_TO_COMPARE if was_aside.any() else REPLIES_TO_COMPARE
        ):
            return {}
        return _strangers(ids, stacked([replies[i] for i in ids], "compared"), was_aside)

    def too_long(self, name: str, length: float, usual: float, was_aside: bool) -> str | None:
        """Say why a vector is too long, by what was usual in the round before; None if it is not.

        Parameters
        ----------
        name
            What it is.
        length
            How long it is.
        usual
            The median length in the round before; 0 if nobody knows.
        was_aside
            Whether its client was set aside when it last replied.
        """
        if self.max_length is None:
            return None
        limit = min(LENGTH_OF_DRAGGING, self.max_length) if was_aside else self.max_length
        if usual == 0 or length <= limit * usual:
            return None
        return _why_too_long(name, length / usual, limit)

    def longest_untouched(self, usual: float) -> float:
        """Give how long an update may be to be neither too long nor shortened."""
        limits = [limit for limit in (self.max_length, self.clipped_length) if limit is not None]
        return min(limits) * usual if limits and usual else math.inf

    def shortening(self, length: float, usual: float) -> float:
        """Give what to multiply a vector by, so that it is no longer than it may count for."""
        if self.clipped_length is None or usual == 0 or length <= self.clipped_length * usual:
            return 1.0
        return float(np.float32(self.clipped_length * usual / length))

    def knows(self, similarities: Collection[float], dim: int) -> bool:
        """Say whether somebody who was a stranger resembles one of those that it is compared with."""
        bound = _chance_bound(len(similarities), dim)
        if not self.sets_strangers_aside or bound > WIDEST_BOUND:
            return True
        return max(similarities) > min(CLEARLY * bound, WIDEST_BOUND)


DEFAULT_GUARD = Guard()


def capped_weights(weights: NDArray[np.float64], max_share: float) -> NDArray[np.float64]:
    """Lower the largest weights so that none has more than a share of their sum.

    Parameters
    ----------
    weights
        Shape (n,), positive.
    max_share
        In (0, 1]; with 1 / n or less all become equal.

    Returns
    -------
    NDArray
        Shape (n,): the same numbers where no share is too large.

    Examples
    --------
    >>> capped_weights(np.array([1.0, 2.0, 97.0]), 0.5)
    array([1., 2., 3.])
    >>> capped_weights(np.array([1.0, 2.0, 97.0]), 0.2)
    array([1., 1., 1.])
    """
    if weights.max() <= max_share * weights.sum():
        return weights
    ascending = np.sort(weights)
    below = np.concatenate([[0.0], np.cumsum(ascending)])  # sums of the smallest ones
    for num_capped in range(1, len(weights)):
        # The largest ones at t: t = max_share * (sum of the others + num_capped * t).
        left = 1 - num_capped * max_share
        if left <= 0:
            break
        most = max_share * below[len(weights) - num_capped] / left
        if ascending[-num_capped - 1] <= most:
            capped: NDArray[np.float64] = np.minimum(weights, most)
            return capped
    return np.full_like(weights, ascending[0])


def _too_long(
    ids: list[str],
    lengths: NDArray[np.float64],
    usual: float,
    limits: NDArray[np.float64],
    name: str,
) -> dict[str, str]:
    if usual == 0:
        return {}
    return {
        ids[row]: _why_too_long(name, lengths[row] / usual, limits[row])
        for row in np.flatnonzero(lengths > limits * usual).tolist()
    }


def _why_too_long(name: str, times: float, limit: float) -> str:
    return (
        f"set aside: the {name} is {times:.3g} times as long as usual in its cluster, more than "
        f"{limit:g} times"
    )


def _resemblance(updates: Array) -> NDArray[np.float64]:
    """Give the largest cosine of every update with any of a hundred others, without its sign."""
    rows = some_rows(updates.shape[0], OTHERS_AT_FIRST)
    similarity = np.abs(to_numpy(cosine_similarity(updates, take_rows(updates, rows.tolist()))))
    similarity[rows, np.arange(len(rows))] = 0  # not with itself
    largest: NDArray[np.float64] = similarity.max(axis=1).astype(np.float64)
    return largest


def _chance_bound(num_clients: int, dim: int) -> float:
    """Give the cosine that isotropic noise hardly exceeds with any of so many vectors."""
    # With each of them it has a standard deviation of 1 / sqrt(dim).
    return NormalDist().inv_cdf(1 - CHANCE / (2 * num_clients)) / math.sqrt(dim)


def _strangers(ids: list[str], updates: Array, was_aside: NDArray[np.bool_]) -> dict[str, str]:
    """Find the updates whose cosine with every other is within what noise has by chance."""
    num_clients, dim = updates.shape
    bound = _chance_bound(num_clients, dim)
    if bound > WIDEST_BOUND:
        return {}
    # With some others first, in some of the coordinates, where noise is noise as well. Only who
    # resembles none of those is compared with everybody.
    sample, stride = updates, dim // NUMBERS_AT_FIRST
    if stride > 1:
        sample = array_namespace(updates).asarray(updates[:, ::stride], copy=True)
    first_bound = _chance_bound(min(num_clients, OTHERS_AT_FIRST), sample.shape[1])
    resemblance = _resemblance(sample)
    most_resemble = float(np.median(resemblance)) > CLEARLY * first_bound
    is_candidate = np.where(
        was_aside,
        resemblance <= CLEARLY * first_bound,
        most_resemble & (resemblance <= first_bound),
    )
    found = {}
    candidates = np.flatnonzero(is_candidate)
    for block in column_blocks(len(candidates), max(1, NUMBERS_AT_ONCE // num_clients)):
        rows = candidates[block]
        some = take_rows(updates, rows.tolist())
        similarity = np.abs(to_numpy(cosine_similarity(some, updates)))
        similarity[np.arange(len(rows)), rows] = 0  # not with itself
        for row, nearest in zip(rows.tolist(), similarity.max(axis=1).tolist(), strict=True):
            if nearest <= (min(CLEARLY * bound, WIDEST_BOUND) if was_aside[row] else bound):
                found[ids[row]] = (
                    f"set aside: the update resembles nobody's (cosine at most {nearest:.2g}, "
                    "which is not clearly more than noise has by chance)"
                )
    return found
