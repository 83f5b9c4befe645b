"""Differences between groups of clients: each group has a transform of its data.

A transform maps one client's rows ``(x, y)`` to the rows that this client holds. Any function
``(x, y, rng) -> (x, y)`` is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AddNoise",
    "Relabel",
    "Rotate",
    "Transform",
    "feature_noise",
    "label_permutations",
    "label_swaps",
    "rotations",
]

Inputs: TypeAlias = NDArray[Any]
Labels: TypeAlias = NDArray[Any]
Transform: TypeAlias = Callable[[Inputs, Labels, np.random.Generator], tuple[Inputs, Labels]]


@dataclass(frozen=True)
class Relabel:
    """Rename every label: label ``y`` becomes ``new_labels[y]``."""

    new_labels: tuple[int, ...]

    def __call__(self, x: Inputs, y: Labels, rng: np.random.Generator) -> tuple[Inputs, Labels]:
        """Apply it to one client's rows."""
        if len(y) and not (y.min() >= 0 and y.max() < len(self.new_labels)):
            raise ValueError(
                f"labels run from {y.min()} to {y.max()}; this renames 0 to {len(self.new_labels) - 1}"
            )
        return x, np.asarray(self.new_labels, dtype=y.dtype)[y]


@dataclass(frozen=True)
class Rotate:
    """Turn every image counter-clockwise. Quarter turns are exact."""

    degrees: float

    def __call__(self, x: Inputs, y: Labels, rng: np.random.Generator) -> tuple[Inputs, Labels]:
        """Apply it to one client's rows, images in the last two axes."""
        if x.ndim < 3:
            raise ValueError(f"x has shape {x.shape}; only images (..., height, width) rotate")
        quarters, rest = divmod(self.degrees, 90)
        if rest == 0:
            return np.ascontiguousarray(np.rot90(x, int(quarters), axes=(-2, -1))), y
        from scipy.ndimage import rotate

        turned = rotate(x, self.degrees, axes=(-1, -2), reshape=False, order=1, mode="constant")
        return turned.astype(x.dtype), y


@dataclass(frozen=True)
class AddNoise:
    """Add independent Gaussian noise to every input."""

    standard_deviation: float

    def __call__(self, x: Inputs, y: Labels, rng: np.random.Generator) -> tuple[Inputs, Labels]:
        """Apply it to one client's rows."""
        if not np.issubdtype(x.dtype, np.floating):
            raise ValueError(f"x is {x.dtype}; convert it to float32 before adding noise")
        return (x + rng.normal(0, self.standard_deviation, x.shape)).astype(x.dtype), y


def label_swaps(num_groups: int, *, num_classes: int = 10, seed: int) -> list[Transform]:
    """Swap two labels in each group, a different pair in each (the paper's label-swap).

    Parameters
    ----------
    num_groups
        Number of transforms. No two groups swap the same pair. If there are enough labels, no
        label is in two pairs.
    num_classes
        Labels are 0 to num_classes - 1.
    seed
        Decides the labels.

    Returns
    -------
    list of Transform

    Examples
    --------
    >>> label_swaps(1, num_classes=2, seed=0)
    [Relabel(new_labels=(1, 0))]
    """
    pairs = list(combinations(range(num_classes), 2))
    if not 1 <= num_groups <= len(pairs):
        raise ValueError(
            f"num_groups is {num_groups}; {num_classes} labels have {len(pairs)} pairs to swap"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_classes)
    disjoint = [tuple(sorted(order[i : i + 2].tolist())) for i in range(0, num_classes - 1, 2)]
    others = [pairs[i] for i in rng.permutation(len(pairs)) if pairs[i] not in disjoint]
    transforms: list[Transform] = []
    for a, b in [*disjoint, *others][:num_groups]:
        labels = list(range(num_classes))
        labels[a], labels[b] = b, a
        transforms.append(Relabel(tuple(labels)))
    return transforms


def label_permutations(num_groups: int, *, num_classes: int = 10, seed: int) -> list[Transform]:
    """Rename the labels in each group, by a different random permutation in each.

    Parameters
    ----------
    num_groups
        Number of transforms, all different.
    num_classes
        Labels are 0 to num_classes - 1.
    seed
        Decides the permutations.

    Returns
    -------
    list of Transform
    """
    if num_classes < 2 or num_groups < 1:
        raise ValueError(
            f"num_groups is {num_groups} and num_classes {num_classes}; there must be at least "
            "one group and two labels"
        )
    rng = np.random.default_rng(seed)
    permutations: list[tuple[int, ...]] = []
    for _ in range(1000 * num_groups):
        permutation = tuple(rng.permutation(num_classes).tolist())
        if permutation not in permutations:
            permutations.append(permutation)
        if len(permutations) == num_groups:
            return [Relabel(permutation) for permutation in permutations]
    raise ValueError(f"{num_classes} labels do not have {num_groups} different permutations")


def rotations(num_groups: int) -> list[Transform]:
    """Turn the images in each group by another angle, evenly spaced over the circle.

    Examples
    --------
    >>> rotations(2)
    [Rotate(degrees=0.0), Rotate(degrees=180.0)]
    """
    if num_groups < 1:
        raise ValueError(f"num_groups is {num_groups}; it must be at least 1")
    return [Rotate(360 * group / num_groups) for group in range(num_groups)]


def feature_noise(num_groups: int, *, standard_deviation: float) -> list[Transform]:
    """Add more noise in each group than in the one before, up to the given amount in the last.

    One model fits all groups: they are congruent.

    Examples
    --------
    >>> feature_noise(2, standard_deviation=0.2)
    [AddNoise(standard_deviation=0.1), AddNoise(standard_deviation=0.2)]
    """
    return [AddNoise(standard_deviation * (group + 1) / num_groups) for group in range(num_groups)]
