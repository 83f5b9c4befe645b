"""Which labels a client holds."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fedbranch.privacy.audit.victims import Digits, layers

__all__ = ["from_largest_errors", "from_signs", "from_value_statistics", "value_statistics"]

Numbers: TypeAlias = NDArray[np.floating[Any]]
Labels: TypeAlias = NDArray[np.int64]

QUANTILES = np.concatenate([np.geomspace(0.0005, 0.5, 24), 1 - np.geomspace(0.0005, 0.5, 24)])


def from_signs(seen: Numbers) -> Labels:
    """Guess the class whose bias has the most negative gradient: only a held class has one."""
    errors = layers(torch.from_numpy(seen))[3].numpy()
    return np.asarray(errors.argmin(1), np.int64)


def from_largest_errors(values: Numbers) -> Labels:
    """Guess the class with the largest error, where signs are lost."""
    errors = layers(torch.from_numpy(values))[3].numpy()
    return np.asarray(errors.argmax(1), np.int64)


def value_statistics(vectors: Numbers) -> Numbers:
    """Describe vectors by what no order changes: norm, zeros, and quantiles.

    Zeros are what is below a millionth of the largest: rounding is not mistaken for values.
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
    """Learn what the values of each label look like from public records, then read the seen.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params), of one record each.
    practice
        How the public records' gradients look when they are hidden by secrets of the server's
        own: at the model's parameters, if it knows them; else at several that it draws.
    """
    features = np.concatenate([value_statistics(hidden) for hidden in practice])
    labels = np.concatenate([public.labels] * len(practice))
    middle, spread = features.mean(0), features.std(0) + 1e-12
    reader = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.01)
    reader.fit((features - middle) / spread, labels)
    guessed: Labels = reader.predict((value_statistics(seen) - middle) / spread)
    return guessed
