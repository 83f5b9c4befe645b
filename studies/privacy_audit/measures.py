"""How well an attack did, and the word for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest, t

__all__ = ["FLOAT32_LIMIT_DB", "Measured", "Word", "judge_hits", "judge_images", "pool", "psnr"]

Numbers: TypeAlias = NDArray[np.floating[Any]]
Word: TypeAlias = Literal["all", "leaks", "hints", "chance"]

CONFIDENCE = 0.99
FLOAT32_LIMIT_DB = 120.0  # images in float32 cannot agree better
WHOLE_IMAGE_DB = 60.0  # an error of 0.001 of the range, which is invisible
WHOLE_RATE = 0.99
LEAK_GAIN_DB = 1.0  # a smaller gain over the guess is a hint
LEAK_RATIO = 2.0  # a smaller multiple of the guess's rate is a hint
NUM_DECIMALS = 4  # further digits differ from machine to machine


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one attack got under one transform.

    Attributes
    ----------
    unit
        ``"dB"``: peak signal-to-noise ratio of images, mean over records. ``"rate"``: the
        share of right guesses.
    value, low, high
        The result and the bounds of its 99 % interval. For a rate the interval is that of
        Clopper and Pearson. For images it is the interval of the mean gain over the guess,
        added to the guess's value.
    chance
        The result of a guess that looks at no update: the mean image; one class of ten; one
        candidate of N.
    trials
        The number of guesses that were judged.
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
        if self.value >= (WHOLE_IMAGE_DB if self.unit == "dB" else WHOLE_RATE):
            return "all"
        if self.low <= self.chance:
            return "chance"
        if self.unit == "dB":
            return "leaks" if self.value >= self.chance + LEAK_GAIN_DB else "hints"
        # A high chance cannot be doubled: half of the way to 1 is enough then.
        enough = min(LEAK_RATIO * self.chance, (1 + self.chance) / 2)
        return "leaks" if self.value >= enough else "hints"


def psnr(guessed: Numbers, images: Numbers) -> Numbers:
    """Compute the peak signal-to-noise ratio over the last axis, in decibels.

    Parameters
    ----------
    guessed, images
        Values in [0, 1]. Guesses outside are clipped.

    Examples
    --------
    >>> psnr(np.array([0.1, 0.1]), np.array([0.0, 0.2])).round(6)
    np.float64(20.0)
    """
    errors = np.mean((np.clip(guessed, 0, 1) - images) ** 2, axis=-1, dtype=np.float64)
    decibels: Numbers = -10 * np.log10(np.maximum(errors, 10 ** (-FLOAT32_LIMIT_DB / 10)))
    return decibels


def judge_images(guessed: Numbers, images: Numbers, mean_image: Numbers) -> Measured:
    """Compare guessed images with the true ones.

    Parameters
    ----------
    guessed
        Shape (victims, guesses, 64). The guesses for one client's records may be in any order:
        each record is compared with the guess that it is matched with best.
    images
        Shape (victims, records, 64).
    mean_image
        Shape (64,): the guess of a server that knows public digits and looks at no update.
    """
    guessed = np.nan_to_num(guessed, nan=0.5, posinf=1.0, neginf=0.0)
    rows = []
    for its_guesses, its_images in zip(guessed, images, strict=True):
        pairs = psnr(its_guesses[None, :, :], its_images[:, None, :])
        matched = linear_sum_assignment(pairs, maximize=True)
        rows.append(pairs[matched])
    gained = np.concatenate(rows)
    by_guess = psnr(mean_image, images).reshape(-1)
    # Records of one client are not independent, so the interval is over clients.
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


def judge_hits(hits: NDArray[np.bool_], chance: float) -> Measured:
    """Measure the rate of guesses that are right or wrong.

    Examples
    --------
    >>> measured = judge_hits(np.array([True] * 3 + [False] * 97), chance=0.1)
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


def pool(parts: Sequence[Measured]) -> Measured:
    """Measure the rate over the guesses of several scenes."""
    hits = np.concatenate(
        [np.arange(part.trials) < round(part.value * part.trials) for part in parts]
    )
    return judge_hits(hits, float(np.mean([part.chance for part in parts])))


def _rounded(value: float) -> float:
    return round(float(value), NUM_DECIMALS)
