"""Updates of very different sizes."""

import numpy as np


def some_updates(num, dim, seed=0, spread=3.0):
    """Updates of very different sizes, some entries of which are tiny or zero."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-spread, spread, size=(num, 1))
    updates = sizes * rng.standard_t(2, size=(num, dim))
    updates[rng.random((num, dim)) < 0.2] *= 1e-9
    updates[rng.random((num, dim)) < 0.1] = 0
    updates[:, 0] = sizes[:, 0]
    return updates.astype(np.float32)
