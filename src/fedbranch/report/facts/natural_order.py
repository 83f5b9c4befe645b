"""The order in which people sort names that contain numbers."""

from __future__ import annotations

import re

__all__ = ["natural_order"]


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key by which ``c9`` comes before ``c10``.

    Examples
    --------
    >>> sorted(["c10", "c9", "a"], key=natural_order)
    ['a', 'c9', 'c10']
    """
    parts = re.split(r"([0-9]{1,18})", name)
    return [(0, int(part)) if i % 2 else (1, part) for i, part in enumerate(parts)]
