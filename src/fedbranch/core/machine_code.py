"""Machine code by Numba, where that is installed (``pip install 'fedbranch[fast]'``).

For the few loops that NumPy needs several passes, or many calls, for. Whoever has a twin in
machine code has it in a module of its own, which is imported by :func:`machine_code` when it is
first worth it; both give the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

__all__ = ["compiled", "machine_code"]


@lru_cache
def machine_code(module: str) -> ModuleType | None:
    """Import a module that needs Numba; None if Numba is not there."""
    try:
        return importlib.import_module(module)
    except ImportError:  # of Numba, or it does not go with this NumPy
        return None


def compiled(signature: Any) -> Callable[[Any], Any]:
    """Compile at once, for the one signature, and keep the machine code where that is possible.

    No flag lets the compiler change the order of float operations, and the global interpreter
    lock is released.
    """
    from numba import njit

    def made(function: Any) -> Any:
        try:
            return njit(signature, nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # no directory can be written to
            return njit(signature, nogil=True, error_model="numpy")(function)

    return made
