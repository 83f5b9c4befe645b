"""What the server does against clients that work against the others.

A reply that no honest client sends is set aside before anything is averaged, compared or
examined. No client, however it behaves, gets more than its share of the weight, of the clusters,
or of the newcomers.

The guard cannot see replies that honest clients could send, such as a copy of another client's
update, or a lie that is smaller than the differences between honest clients.
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
from fedbranch.server.replies.reply import LENGTHS_OF, Reply, stacked
from fedbranch.types import Array

__all__ = ["DEFAULT_GUARD", "Guard", "capped_weights", "usual_lengths"]

# Fewer replies do not show what is usual.
REPLIES_TO_COMPARE = 5
# But three are enough to readmit a client that was set aside.
REPLIES_TO_READMIT = 3
REPLIES_TO_CAP = 3  # of two clients one may well have most of the examples
# The probability in a round that isotropic noise resembles another update by chance.
CHANCE = 0.05
# An update is a stranger only if the others' median cosine exceeds 3 x the noise bound; its client
# is readmitted once its own largest cosine does.
STRANGER_MARGIN = 3
# Where the mean is longer than most updates, the longest ones balance nothing and drag all others
# along. Then this many times the usual length is too long, unless the client has as many times the
# usual data.
DRAGGING_LENGTH = 5.0
# Pre-screen for strangers: compare 8,192 coordinates of each update with 100 sampled clients.
# Only updates that resemble none of these are compared with all.
SCREENED_COORDINATES = 8192
SCREENED_CLIENTS = 100
SIMILARITIES_AT_ONCE = 2**24  # of these updates with all others
# With a larger noise bound, in few dimensions, any update resembles another by chance.
LARGEST_NOISE_BOUND = 0.3


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Limits that honest clients do not come near to.

    Parameters
    ----------
    max_length
        A reply whose update (or signal, or buffers) is longer than ``max_length`` times the median
        of its cluster is set aside. Where one client pulls against n others, its update may
        honestly be n times as long when the cluster has come to rest; keep the limit above that.
        While the mean is longer than most updates the limit is 5 times the median, multiplied by
        how many times more examples the client has. A client that was set aside is readmitted
        when its reply is shorter. None: any length.
    clipped_length
        In means an update counts with at most ``clipped_length`` times the median length of its
        cluster. It is compared at its own length. None: it counts with its own.
    sets_strangers_aside
        Set replies aside that resemble no other, less than noise would by chance, while most
        others resemble each other. Such a client is readmitted when its update resembles another.
    max_share
        The largest share of a cluster's weight that one client can have, where at least three
        have answered. A client that claims more examples counts for that share. None: any. Where
        updates are not kept, the ⌈1 / max_share⌉ heaviest of a cluster are held back whole until
        the round is over, so a tiny share takes much memory.
    max_clusters
        No split makes more clusters than this. None: any number.
    ignored_share
        A newcomer goes where the most similar of the updates cached on an edge is, as in the
        paper, but of each edge this share of them, the most similar ones, does not count. So
        that share of poisoned updates cannot attract newcomers. At most 0.5.
    num_best
        The mean over the ``num_best`` most similar of those that count decides. It protects edges
        with few updates, where the ignored share of them is none. With 1 the largest decides, as
        in the paper.

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
        """Return what clients count for that claim these numbers of examples, shape (n,)."""
        if self.max_share is None or len(counts) < REPLIES_TO_CAP:
            return counts
        return capped_weights(counts, self.max_share)

    @property
    def most_capped(self) -> int:
        """How many clients may count for less than they claim: at most, and the heaviest ones.

        If k clients have the share s each, k is at most 1 / s.
        """
        return 0 if self.max_share is None else math.ceil(1 / self.max_share)

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
        if len(ids) < (REPLIES_TO_READMIT if was_aside.any() else REPLIES_TO_COMPARE):
            return {}
        ordered = [replies[client_id] for client_id in ids]
        compared = stacked(ordered, "update")
        judged = {"update": compared, "buffers": stacked(ordered, "buffers")}
        if ordered[-1].rows.signal is not None:
            judged["signal"] = compared = stacked(ordered, "signal")
        found: dict[str, str] = {}
        if self.max_length is not None:
            counts = np.array([reply.weight for reply in ordered])
            # Clients that were set aside do not define what is usual, even if there are many of them.
            is_usual = ~was_aside if not was_aside.all() else was_aside
            for name, rows in judged.items():
                lengths = to_numpy(norms(rows)) if rows.shape[1] else np.zeros(len(ids))
                usual = float(np.median(lengths[is_usual]))
                limits = np.full(len(ids), self.max_length)
                if name != "buffers" and lengths.max() > DRAGGING_LENGTH * usual:
                    more_data = np.maximum(counts / np.median(counts[is_usual]), 1.0)
                    stricter = np.minimum(DRAGGING_LENGTH * more_data, self.max_length)
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
        """Find the replies that resemble no other, by what is compared of them: client id -> why.

        For replies of summed updates. Their lengths are judged by :meth:`too_long`.
        """
        ids = sorted(replies)
        was_aside = np.array([client_id in already for client_id in ids])
        if not self.sets_strangers_aside or len(ids) < (
            REPLIES_TO_READMIT if was_aside.any() else REPLIES_TO_COMPARE
        ):
            return {}
        return _strangers(ids, stacked([replies[i] for i in ids], "compared"), was_aside)

    def too_long(self, name: str, length: float, usual: float, was_aside: bool) -> str | None:
        """Return why a vector is too long, compared with the round before; None if it is not.

        Parameters
        ----------
        name
            What it is: the update, the signal or the buffers.
        length
            Its length.
        usual
            The median length in the round before; 0 if it is not known.
        was_aside
            Whether its client was set aside when it last replied.
        """
        if self.max_length is None:
            return None
        limit = min(DRAGGING_LENGTH, self.max_length) if was_aside else self.max_length
        if usual == 0 or length <= limit * usual:
            return None
        return _why_too_long(name, length / usual, limit)

    def longest_untouched(self, usual: float) -> float:
        """Return up to which length an update is neither too long nor shortened."""
        limits = [limit for limit in (self.max_length, self.clipped_length) if limit is not None]
        return min(limits) * usual if limits and usual else math.inf

    def shortening(self, length: float, usual: float) -> float:
        """Return the factor that makes a vector no longer than it may count for."""
        if self.clipped_length is None or usual == 0 or length <= self.clipped_length * usual:
            return 1.0
        return float(np.float32(self.clipped_length * usual / length))

    def knows(self, similarities: Collection[float], dim: int) -> bool:
        """Return whether a stranger resembles one of the updates that it was compared with."""
        bound = _chance_bound(len(similarities), dim)
        if not self.sets_strangers_aside or bound > LARGEST_NOISE_BOUND:
            return True
        return max(similarities) > min(STRANGER_MARGIN * bound, LARGEST_NOISE_BOUND)


DEFAULT_GUARD = Guard()


def usual_lengths(replies: Collection[Reply]) -> dict[str, float]:
    """Return the median lengths of sketched replies, for the limits of the round after.

    Empty if too few of them were measured to say what is usual.
    """
    measured = [reply for reply in replies if reply.rows.lengths is not None]
    if len(measured) < REPLIES_TO_COMPARE:
        return {}
    medians = np.median(stacked(measured, "lengths"), axis=0)
    return dict(zip(LENGTHS_OF, medians.tolist(), strict=True))


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
    """Compute the largest absolute cosine of every update with any of a hundred others."""
    rows = some_rows(updates.shape[0], SCREENED_CLIENTS)
    similarity = np.abs(to_numpy(cosine_similarity(updates, take_rows(updates, rows.tolist()))))
    similarity[rows, np.arange(len(rows))] = 0  # not with itself
    largest: NDArray[np.float64] = similarity.max(axis=1).astype(np.float64)
    return largest


def _chance_bound(num_clients: int, dim: int) -> float:
    """Compute the cosine that isotropic noise hardly exceeds with any of ``num_clients`` vectors."""
    # With each of them it has a standard deviation of 1 / sqrt(dim).
    return NormalDist().inv_cdf(1 - CHANCE / (2 * num_clients)) / math.sqrt(dim)


def _strangers(ids: list[str], updates: Array, was_aside: NDArray[np.bool_]) -> dict[str, str]:
    """Find the updates whose cosine with every other is within what noise has by chance."""
    num_clients, dim = updates.shape
    bound = _chance_bound(num_clients, dim)
    if bound > LARGEST_NOISE_BOUND:
        return {}
    # First with a sample of clients in a sample of coordinates, where noise is noise as well. Only
    # updates that resemble none of these are compared with all.
    sample, stride = updates, dim // SCREENED_COORDINATES
    if stride > 1:
        sample = array_namespace(updates).asarray(updates[:, ::stride], copy=True)
    first_bound = _chance_bound(min(num_clients, SCREENED_CLIENTS), sample.shape[1])
    resemblance = _resemblance(sample)
    most_resemble = float(np.median(resemblance)) > STRANGER_MARGIN * first_bound
    is_candidate = np.where(
        was_aside,
        resemblance <= STRANGER_MARGIN * first_bound,
        most_resemble & (resemblance <= first_bound),
    )
    found = {}
    candidates = np.flatnonzero(is_candidate)
    for block in column_blocks(len(candidates), max(1, SIMILARITIES_AT_ONCE // num_clients)):
        rows = candidates[block]
        some = take_rows(updates, rows.tolist())
        similarity = np.abs(to_numpy(cosine_similarity(some, updates)))
        similarity[np.arange(len(rows)), rows] = 0  # not with itself
        for row, nearest in zip(rows.tolist(), similarity.max(axis=1).tolist(), strict=True):
            if nearest <= (
                min(STRANGER_MARGIN * bound, LARGEST_NOISE_BOUND) if was_aside[row] else bound
            ):
                found[ids[row]] = (
                    f"set aside: the update resembles no other (cosine at most {nearest:.2g}, "
                    "which is not clearly more than noise has by chance)"
                )
    return found
