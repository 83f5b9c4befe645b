"""Differences of many replies, and their lengths, in machine code, by Numba.

What NumPy does array by array, thousands of times a round, is one call here, without the
interpreter's lock: between two calls other threads would have to be waited for. Loaded by :mod:`fedbranch.flower.steps`, if Numba is
installed, and gives the same bits as NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.extending import intrinsic
from numba.types import Array, CPointer, float32, float64, int64, uint64, void
from numpy.typing import NDArray

from fedbranch.core.machine_code import compiled
from fedbranch.core.summation_compiled import BLOCK, square_of

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
        float64[:, ::1],
    )
)
def write_steps(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    before: NDArray[np.float32],
    rows: NDArray[np.int64],
    steps: NDArray[np.float32],
    squares: NDArray[np.float64],
) -> None:
    """Write, for every reply, its numbers minus those before, into its row of the steps.

    And into that of ``squares`` the squared length of each block of them.

    A reply's numbers are at some addresses, as many each as ``lengths`` says: who calls this has
    checked that so many are there, and keeps them alive.
    """
    dim = len(before)
    halves = np.empty(BLOCK // 2, np.float32)
    for number in range(addresses.shape[0]):
        row = rows[number]
        place = 0
        for part in range(addresses.shape[1]):
            after = carray(_numbers_at(addresses[number, part]), (lengths[part],))
            done = 0
            while done < lengths[part]:
                # Up to where a block ends, while it is in the processor's first cache.
                block = place // BLOCK
                last = min((block + 1) * BLOCK, dim)
                here = min(last - place, lengths[part] - done)
                came, own = after[done : done + here], before[place : place + here]
                step = steps[row, place : place + here]
                for i in range(here):
                    step[i] = came[i] - own[i]
                place += here
                done += here
                if place == last:
                    squares[row, block] = square_of(steps[row, block * BLOCK : last], halves)
