"""Differences of many replies in machine code, by Numba, without holding the interpreter's lock.

What NumPy does array by array, thousands of times a round, is one call here; between two calls
other threads would have to be waited for. Loaded by :mod:`fedbranch.flower.steps`, if Numba is
installed, and gives the same bits as NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.extending import intrinsic
from numba.types import Array, CPointer, float32, int64, uint64, void
from numpy.typing import NDArray

from fedbranch.core.machine_code import compiled

__all__ = ["write_steps"]


@intrinsic  # type: ignore[untyped-decorator]
def _numbers_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 -- Numba's signature
    """See an address as that of float32 numbers."""
    signature = CPointer(float32)(address)

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generated


@compiled(
    void(
        Array(uint64, 2, "C", readonly=True),
        Array(int64, 1, "C", readonly=True),
        Array(float32, 1, "C", readonly=True),
        Array(int64, 1, "C", readonly=True),
        float32[:, ::1],
    )
)
def write_steps(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    before: NDArray[np.float32],
    rows: NDArray[np.int64],
    steps: NDArray[np.float32],
) -> None:
    """Write, for every reply, its numbers minus those before, into its row of the steps.

    A reply's numbers are at some addresses, as many each as ``lengths`` says: who calls this has
    checked that so many are there, and keeps them alive.
    """
    for number in range(addresses.shape[0]):
        start = 0
        for part in range(addresses.shape[1]):
            end = start + lengths[part]
            after = carray(_numbers_at(addresses[number, part]), (lengths[part],))
            own, step = before[start:end], steps[rows[number], start:end]
            for i in range(end - start):
                step[i] = after[i] - own[i]
            start = end
