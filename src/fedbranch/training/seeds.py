"""Seeds for every place of a run, and who is drawn in a round.

What is drawn depends on (seed, round, ...) and on who is there alone: two drivers that ask the
same number of clients ask the same ones, and so does a run that was resumed.
"""

from __future__ import annotations

import hashlib

__all__ = ["stream_seed"]


def stream_seed(seed: int, *where: int | str) -> int:
    """Derive an independent seed for one place of a run, such as (round, client id).

    Examples
    --------
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-07")
    True
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-08")
    False
    """
    name = "\x1f".join(str(part) for part in (seed, *where))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
