"""Updates that attackers make up, each as in the paper that it comes from.

An attacker here knows more than any real one would: all honest updates of the same round, as
they are sent. That is the papers' setting of full knowledge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Craft",
    "Numbers",
    "View",
    "a_little_is_enough",
    "common_direction",
    "gaussian",
    "inner_product_manipulation",
    "largest_shift",
    "mimic",
    "min_max",
    "model_replacement",
    "opposite",
    "times",
]

Numbers: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class View:
    """What an attacker knows when it makes up an update.

    Attributes
    ----------
    own
        The update that it would send if it were honest.
    honest
        Shape (num_honest, dim): the updates sent by the honest clients that train at the same
        parameters.
    num_attackers
        The number of attackers that train at the same parameters, itself included.
    rng
        Differs for each client, round and half.
    secret_rng
        The same for all attackers and rounds.
    """

    own: Numbers
    honest: NDArray[np.float64]
    num_attackers: int
    rng: np.random.Generator
    secret_rng: np.random.Generator

    @property
    def num_clients(self) -> int:
        """The number of clients that train at the same parameters."""
        return len(self.honest) + self.num_attackers


Craft: TypeAlias = Callable[[View], Numbers]


def opposite(view: View) -> Numbers:
    """Send the opposite of the own update."""
    return -view.own


def gaussian(factor: float) -> Craft:
    """Send new noise in each round, ``factor`` times as long as the own update."""

    def craft(view: View) -> Numbers:
        return factor * _as_long_as(view.own, view.rng.normal(size=len(view.own)))

    return craft


def common_direction(view: View) -> Numbers:
    """Send the attackers' secret direction, the same in all rounds, as long as the own update."""
    return _as_long_as(view.own, view.secret_rng.normal(size=len(view.own)))


def times(factor: float) -> Craft:
    """Send a multiple of the own update."""

    def craft(view: View) -> Numbers:
        return factor * view.own

    return craft


def a_little_is_enough(view: View) -> Numbers:
    """Shift the honest mean by z standard deviations, too few to be noticed (Baruch et al., 2019).

    ``mean - z * std`` for each coordinate. z is chosen so that the attackers and the honest
    clients that are still farther out form a majority. With few attackers z is 0.
    """
    shift = largest_shift(view.num_clients, view.num_attackers)
    shifted: Numbers = view.honest.mean(axis=0) - shift * view.honest.std(axis=0)
    return shifted


def largest_shift(num_clients: int, num_attackers: int) -> float:
    """Compute the z of a little is enough: Φ(z) = (n - m - s) / (n - m), s = ⌊n/2 + 1⌋ - m.

    Where the attackers are a majority by themselves, one supporter (s = 1) is assumed.
    """
    num_honest = num_clients - num_attackers
    num_supporters = max(1, math.floor(num_clients / 2 + 1) - num_attackers)
    share = (num_honest - num_supporters) / num_honest
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


def inner_product_manipulation(scale: float) -> Craft:
    """Send the opposite of the honest mean, scaled (Xie et al., 2020)."""

    def craft(view: View) -> Numbers:
        mean: Numbers = view.honest.mean(axis=0)
        return -scale * mean

    return craft


def min_max(view: View) -> Numbers:
    """Go from the honest mean towards its opposite, but not far (Shejwalkar & Houmansadr, 2021).

    The largest distance to an honest update is then the largest one between honest updates.
    """
    mean: Numbers = view.honest.mean(axis=0)
    length = np.linalg.norm(mean)
    if length == 0:
        return mean
    towards = -mean / length
    gram = view.honest @ view.honest.T
    squares = np.diag(gram)
    diameter = max(0.0, float((squares[:, None] + squares[None, :] - 2 * gram).max()))
    offsets = mean - view.honest
    along = offsets @ towards
    # |offset + step * towards|**2 <= diameter: the larger root for each honest update, and of
    # these the smallest.
    rest = np.maximum(0.0, along**2 - (offsets**2).sum(axis=1) + diameter)
    return mean + float((np.sqrt(rest) - along).min()) * towards


def model_replacement(view: View) -> Numbers:
    """Scale the own update so that the attackers' mean replaces the model (Bagdasaryan, 2020)."""
    return view.num_clients / view.num_attackers * view.own


def mimic(view: View) -> Numbers:
    """Copy an honest client's update: the same client's in all rounds in which it is present.

    No check can see that (Karimireddy et al., 2022). The copied client's data count for more
    than others'.
    """
    copied: Numbers = view.honest[0]
    return copied


def _as_long_as(own: Numbers, direction: Numbers) -> Numbers:
    return direction * (np.linalg.norm(own) / np.linalg.norm(direction))
