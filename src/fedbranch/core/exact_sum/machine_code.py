"""Loads the machine code of Numba, where that is installed (``pip install 'fedbranch[fast]'``).

The few loops for which NumPy needs several passes, or many calls, are in
:mod:`fedbranch.core.exact_sum.compiled`. That module is imported when it is first worth it. It
computes the same bits as NumPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

__all__ = ["compile_now", "machine_code", "worthwhile_machine_code"]

MODULE = "fedbranch.core.exact_sum.compiled"
LEAST_NUMBERS = 2**16  # of a call; with fewer, loading machine code would take longer


@lru_cache
def machine_code() -> ModuleType | None:
    """Import the compiled loops; None if Numba is not installed."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:  # no Numba, or one that does not support this NumPy
        return None


def worthwhile_machine_code(num_entries: int) -> ModuleType | None:
    """Import the compiled loops if a call has enough numbers to be worth it."""
    return machine_code() if num_entries >= LEAST_NUMBERS else None


def compile_now(signature: Any) -> Callable[[Any], Any]:
    """Compile a function now, for one signature; keep the machine code on disk if possible.

    No flag lets the compiler change the order of float operations. The global interpreter lock
    is released while it runs.
    """
    from numba import njit

    def made(function: Any) -> Any:
        try:
            return njit(signature, nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # no directory for the cache can be written
            return njit(signature, nogil=True, error_model="numpy")(function)

    return made
