"""Independent seeds for every use of randomness in a run.

A seed is a hash of the run's seed and the place of its use, such as (round, client id). So
both drivers, and a run that was resumed, draw the same numbers at the same place.
"""

from __future__ import annotations

import hashlib

__all__ = ["stream_seed"]


def stream_seed(seed: int, *where: int | str) -> int:
    """Derive the seed for one place in a run, such as (round, client id).

    Returns
    -------
    int
        From 0 to 2**63 - 1.

    Examples
    --------
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-07")
    True
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-08")
    False
    """
    name = "\x1f".join(str(part) for part in (seed, *where))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
