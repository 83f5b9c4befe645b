"""Where rows come from: real data sets as NumPy arrays."""

from __future__ import annotations

import numpy as np

from fedbranch.data.clients import Examples

__all__ = ["digits"]


def digits() -> Examples:
    """Load scikit-learn's 1,797 handwritten digits, which ship with it.

    The images have shape (1797, 1, 8, 8) and are float32 in [0, 1]; labels are 0-9.

    Examples
    --------
    >>> digits().x.shape
    (1797, 1, 8, 8)
    """
    from sklearn.datasets import load_digits  # a second of imports that only this needs

    images, labels = load_digits(return_X_y=True)
    return Examples(
        x=(images.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y=labels.astype(np.int64)
    )
