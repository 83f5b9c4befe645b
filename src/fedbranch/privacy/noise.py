"""Differential privacy for each client: updates are clipped, and noise is added.

A client does this by itself, before its update is hidden or sent. So it has to trust neither the
server nor the other clients, even if these know the shared secret.
"""

from __future__ import annotations

import math
import operator
import secrets
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fedbranch.protocol.tasks import Update

__all__ = ["Noise"]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Clip an update and add normal noise to each of its numbers.

    Attributes
    ----------
    clip
        The largest length of an update before noise. A longer one is shortened to it.
    multiplier
        The standard deviation of the noise in each coordinate, divided by ``clip``. Zero:
        updates are clipped only, which protects nothing.

    Notes
    -----
    The noise protects all data of a client at once: for any data, its clipped updates lie in a
    ball of radius ``clip``. So updates from two data sets are up to ``2 * clip`` apart, and that
    is the sensitivity that :meth:`epsilon` assumes.

    Participation in rounds and the number of examples that a client states count as public.
    Metrics are not sent. Losses under trial models must not be sent either.

    The noise is drawn in double precision and sent in single precision. As in most libraries,
    :meth:`epsilon` does not include what such rounding may reveal (Mironov, 2012).

    Examples
    --------
    >>> noise = Noise(clip=1.0, multiplier=8.0)
    >>> round(noise.epsilon(10, delta=1e-5), 3)
    3.341
    >>> sent = noise.applied(Update(np.float32([3.0, 4.0]), 20), np.random.default_rng(0))
    >>> sent.vector
    array([ 1.6058418 , -0.25683892], dtype=float32)
    """

    clip: float
    multiplier: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip is {self.clip}; it must be a finite number above 0")
        if not (math.isfinite(self.multiplier) and self.multiplier >= 0):
            raise ValueError(f"multiplier is {self.multiplier}; it must be finite, and at least 0")

    @classmethod
    def for_epsilon(cls, epsilon: float, *, delta: float, num_releases: int, clip: float) -> Noise:
        """Choose the least noise that gives (epsilon, delta)-differential privacy.

        Parameters
        ----------
        epsilon, delta
            The privacy to give.
        num_releases
            The largest number of releases of a client; see :meth:`num_releases`.
        clip
            As for the class.

        Examples
        --------
        >>> noise = Noise.for_epsilon(4.0, delta=1e-5, num_releases=20, clip=0.5)
        >>> round(noise.multiplier, 2), round(noise.epsilon(20, delta=1e-5), 6)
        (9.67, 4.0)
        """
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon is {epsilon}; it must be a finite number above 0")
        _check_delta(delta)
        if operator.index(num_releases) < 1:
            raise ValueError(f"num_releases is {num_releases}; it must be at least 1")
        import dp_accounting  # here, since it takes seconds to load

        deviation = dp_accounting.get_sigma_gaussian(epsilon, delta)  # at sensitivity 1
        return cls(clip=clip, multiplier=2 * math.sqrt(num_releases) * float(deviation))

    def applied(self, update: Update, rng: np.random.Generator | None) -> Update:
        """Return the clipped update with noise, which a client may send.

        Parameters
        ----------
        update
            The update from training. If it has half updates, each of the two is clipped and
            gets noise of its own.
        rng
            For simulations. None: the noise comes from the operating system, as it must where
            real clients are protected.

        Returns
        -------
        Update
            Without metrics. An update with NaN or infinity counts as zero, with a warning,
            since the server must not see that training diverged.

        Raises
        ------
        ValueError
            If there are buffers, or a signal such as the gradient. They are neither clipped
            nor noised, and would reveal what the noise hides.
        """
        if update.buffers is not None and np.size(update.buffers):
            raise ValueError(
                f"the update has {np.size(update.buffers)} buffers, such as the statistics of "
                "BatchNorm, to which no noise is added; use a model without, for example with "
                "GroupNorm, or switch the noise off"
            )
        if update.signal is not None:
            raise ValueError(
                "the update carries a signal, to which no noise is added; train with "
                "send_gradient=False, so that the updates themselves are compared"
            )
        vector = np.asarray(update.vector)
        if update.half_difference is None:
            sent, half = self._released(vector, rng), None
        else:
            difference = np.asarray(update.half_difference)
            with np.errstate(invalid="ignore"):  # values that are not finite become zero below
                updates = [np.add(vector, s * difference, dtype=np.float64) for s in (1, -1)]
            first, second = (self._released(own, rng) for own in updates)
            sent, half = (first + second) / 2, ((first - second) / 2).astype(vector.dtype)
        return replace(
            update,
            vector=sent.astype(vector.dtype),
            half_difference=half,
            metrics={},
            buffers=None,
        )

    @staticmethod
    def num_releases(update: Update) -> int:
        """Count the updates in a reply that come from the client's data: two if it has halves."""
        return 1 if update.half_difference is None else 2

    def epsilon(self, num_releases: int, delta: float) -> float:
        """Compute epsilon after ``num_releases`` updates with this noise.

        Parameters
        ----------
        num_releases
            The sum of :meth:`num_releases` over all replies that a client has sent. Later
            updates may depend on earlier ones.
        delta
            The probability with which the bound may fail; far below 1 / number of clients.

        Returns
        -------
        float
            The smallest epsilon for which (epsilon, delta)-differential privacy holds;
            infinite without noise.

        Notes
        -----
        Normal noise composes exactly: k releases reveal as much as one release with noise that
        is smaller by sqrt(k) (Dong, Roth and Su, 2022). For one release the least epsilon is
        known (Balle and Wang, 2018). So there is neither a numerical accountant nor its error.
        """
        _check_delta(delta)
        if operator.index(num_releases) < 0:
            raise ValueError(f"num_releases is {num_releases}; it must be at least 0")
        if num_releases == 0:
            return 0.0
        import dp_accounting  # here, since it takes seconds to load

        # In units of the sensitivity, which is twice the clip.
        deviation = self.multiplier / 2 / math.sqrt(num_releases)
        return float(dp_accounting.get_epsilon_gaussian(deviation, delta))

    def _released(
        self, update: NDArray[np.floating[Any]], rng: np.random.Generator | None
    ) -> NDArray[np.float64]:
        """Clip one update and add noise to it."""
        clipped = update.astype(np.float64)
        if not np.isfinite(clipped).all():
            warnings.warn(
                "an update contains NaN or infinity and counts as zero; lower the learning rate",
                RuntimeWarning,
                stacklevel=3,
            )
            clipped = np.zeros_like(clipped)
        length = float(np.linalg.norm(clipped))
        if length > self.clip:
            clipped *= self.clip / length
        drawn = _secure_normal(clipped.size) if rng is None else rng.standard_normal(clipped.size)
        return clipped + self.multiplier * self.clip * drawn


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must be between 0 and 1, for example 1e-5")


def _secure_normal(size: int) -> NDArray[np.float64]:
    """Draw normal numbers from the operating system's randomness, which cannot be predicted."""
    drawn = np.frombuffer(secrets.token_bytes(8 * size), np.uint64)
    # 52 bits, in the middle between two steps, so that neither 0 nor 1 can occur.
    uniform = ((drawn >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(ndtri(uniform), dtype=np.float64)
