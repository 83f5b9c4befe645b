"""Machine code by Numba, where that is installed (``pip install 'fedbranch[fast]'``).

For the few loops that NumPy needs several passes, or many calls, for. They are in
:mod:`fedbranch.core.exact_sum.compiled`, which is imported when it is first worth it, and give the
same bits as NumPy does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

__all__ = ["compiled", "machine_code", "worthwhile_machine_code"]

MODULE = "fedbranch.core.exact_sum.compiled"
WORTH_IT = 2**16  # numbers at once; with fewer, loading machine code would take longer


@lru_cache
def machine_code() -> ModuleType | None:
    """Import what needs Numba; None if Numba is not there."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:  # of Numba, or it does not go with this NumPy
        return None


def worthwhile_machine_code(num_entries: int) -> ModuleType | None:
    """Import it if there are so many numbers to go over that it is worth it."""
    return machine_code() if num_entries >= WORTH_IT else None


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
