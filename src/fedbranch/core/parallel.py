"""The cores that this process may use."""

from __future__ import annotations

import os
import sys

__all__ = ["num_cores"]


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)
