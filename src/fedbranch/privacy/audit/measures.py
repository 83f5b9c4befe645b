"""How well an attack did, and in which word that is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest, t

__all__ = ["ALL_DB", "Measured", "Word", "of_hits", "of_images", "pooled", "psnr"]

Numbers: TypeAlias = NDArray[np.floating[Any]]
Word: TypeAlias = Literal["all", "leaks", "hints", "chance"]

CONFIDENCE = 0.99
MOST_DB = 120.0  # float32 gives no more
ALL_DB = 60.0  # an error of 0.001 of the range: nobody sees it
ALL_RATE = 0.99
LEAST_GAIN_DB = 1.0
LEAST_RATIO = 2.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one attack got under one transform.

    Attributes
    ----------
    unit
        ``"dB"``: peak signal-to-noise ratio of images, mean over records; ``"rate"``: the
        share of right guesses.
    value, low, high
        With the bounds of its 99 % interval: Clopper-Pearson's for a rate; for images that
        of the mean gain over the guess, added to the guess's value.
    chance
        What a guess without looking at any update gets: the mean image; one class of ten;
        one candidate of N.
    trials
        How many guesses were judged.
    """

    unit: Literal["dB", "rate"]
    value: float
    low: float
    high: float
    chance: float
    trials: int

    @property
    def word(self) -> Word:
        """``all``; ``leaks``; ``hints``, above chance but not by much; or ``chance``."""
        if self.value >= (ALL_DB if self.unit == "dB" else ALL_RATE):
            return "all"
        if self.low <= self.chance:
            return "chance"
        if self.unit == "dB":
            return "leaks" if self.value >= self.chance + LEAST_GAIN_DB else "hints"
        # Where chance is high, twice as good is not possible: halfway to all is as much.
        enough = min(LEAST_RATIO * self.chance, (1 + self.chance) / 2)
        return "leaks" if self.value >= enough else "hints"


def psnr(guessed: Numbers, images: Numbers) -> Numbers:
    """Compare images with values in [0, 1], over the last axis, in decibels.

    Examples
    --------
    >>> psnr(np.array([0.1, 0.1]), np.array([0.0, 0.2])).round(6)
    np.float64(20.0)
    """
    errors = np.mean((np.clip(guessed, 0, 1) - images) ** 2, axis=-1, dtype=np.float64)
    decibels: Numbers = -10 * np.log10(np.maximum(errors, 10 ** (-MOST_DB / 10)))
    return decibels


def of_images(guessed: Numbers, images: Numbers, mean_image: Numbers) -> Measured:
    """Judge guessed images.

    Parameters
    ----------
    guessed
        Shape (victims, guesses, 64). For one client's records the guesses may be in any order:
        each record is compared with the guess that it is matched with best.
    images
        Shape (victims, records, 64).
    mean_image
        Shape (64,): the guess of whoever knows what digits look like, and nothing else.
    """
    guessed = np.nan_to_num(guessed, nan=0.5, posinf=1.0, neginf=0.0)
    rows = []
    for its_guesses, its_images in zip(guessed, images, strict=True):
        pairs = psnr(its_guesses[None, :, :], its_images[:, None, :])
        matched = linear_sum_assignment(pairs, maximize=True)
        rows.append(pairs[matched])
    gained = np.concatenate(rows)
    by_guess = psnr(mean_image, images).reshape(-1)
    # Records of one client are not independent: the interval is over clients.
    gains = (gained - by_guess).reshape(len(images), -1).mean(1)
    chance = float(by_guess.mean())
    half = float(
        t.ppf((1 + CONFIDENCE) / 2, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
    )
    middle = float(gained.mean())
    return Measured(
        unit="dB",
        value=_rounded(middle),
        low=_rounded(middle - half),
        high=_rounded(middle + half),
        chance=_rounded(chance),
        trials=len(gained),
    )


def of_hits(hits: NDArray[np.bool_], chance: float) -> Measured:
    """Judge guesses that are right or wrong.

    Examples
    --------
    >>> measured = of_hits(np.array([True] * 3 + [False] * 97), chance=0.1)
    >>> measured.value, measured.low, measured.high, measured.word
    (0.03, 0.0034, 0.1055, 'chance')
    """
    interval = binomtest(int(hits.sum()), hits.size).proportion_ci(CONFIDENCE, method="exact")
    return Measured(
        unit="rate",
        value=_rounded(hits.mean()),
        low=_rounded(interval.low),
        high=_rounded(interval.high),
        chance=_rounded(chance),
        trials=hits.size,
    )


def pooled(parts: Sequence[Measured]) -> Measured:
    """Judge guesses together that were right or wrong in several scenes."""
    hits = np.concatenate(
        [np.arange(part.trials) < round(part.value * part.trials) for part in parts]
    )
    return of_hits(hits, float(np.mean([part.chance for part in parts])))


def _rounded(value: float) -> float:
    """Four places: what is smaller differs from machine to machine."""
    return round(float(value), 4)
