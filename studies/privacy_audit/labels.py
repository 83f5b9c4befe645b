"""Labels that a client holds, from one update."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from studies.privacy_audit.victims import Digits, layers

__all__ = ["from_largest_errors", "from_signs", "from_value_statistics", "value_statistics"]

Numbers: TypeAlias = NDArray[np.floating[Any]]
Labels: TypeAlias = NDArray[np.int64]

QUANTILES = np.concatenate([np.geomspace(0.0005, 0.5, 24), 1 - np.geomspace(0.0005, 0.5, 24)])


def from_signs(seen: Numbers) -> Labels:
    """Guess the class with the most negative bias gradient: only a held class has one."""
    errors = layers(torch.from_numpy(seen))[3].numpy()
    return np.asarray(errors.argmin(1), np.int64)


def from_largest_errors(values: Numbers) -> Labels:
    """Guess the class with the largest error, where signs are lost."""
    errors = layers(torch.from_numpy(values))[3].numpy()
    return np.asarray(errors.argmax(1), np.int64)


def value_statistics(vectors: Numbers) -> Numbers:
    """Describe vectors by what no order changes: norm, zeros, and quantiles.

    A value below a millionth of the largest counts as zero, so that rounding errors do.
    """
    rows = np.sort(vectors.astype(np.float64), axis=1)
    sizes = np.abs(rows)
    largest = sizes.max(1, keepdims=True)
    quantiles = rows[:, np.rint(QUANTILES * (rows.shape[1] - 1)).astype(np.intp)]
    lengths = [sizes.mean(1), np.sqrt((sizes**2).mean(1)), np.sqrt(np.sqrt((sizes**4).mean(1)))]
    zeros = (sizes < 1e-6 * largest).mean(1)
    top = np.sort(np.concatenate([sizes[:, :12], sizes[:, -12:]], axis=1), axis=1)[:, -12:]
    return np.column_stack([quantiles, top, rows[:, :3], zeros, *lengths])


def from_value_statistics(seen: Numbers, practice: list[Numbers], public: Digits) -> Labels:
    """Learn from public records what each label's values look like, then read the seen updates.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params), of one record each.
    practice
        The public records' gradients, hidden by secrets that the server draws. They are
        computed at the model's parameters if the server knows them, else at several models
        that it draws.
    """
    features = np.concatenate([value_statistics(hidden) for hidden in practice])
    labels = np.concatenate([public.labels] * len(practice))
    middle, spread = features.mean(0), features.std(0) + 1e-12
    reader = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.01)
    reader.fit((features - middle) / spread, labels)
    guessed: Labels = reader.predict((value_statistics(seen) - middle) / spread)
    return guessed
