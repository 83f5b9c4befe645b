"""The updates in many replies to one message: what came back minus what was sent."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedbranch.core.machine_code import machine_code
from fedbranch.core.summation import BLOCK, Extent, extents_from
from fedbranch.flower.arrays import NUMPY_FORMAT, Layout, NamedArrays, usual_header
from fedbranch.flower.replies import why_unreadable

__all__ = ["Steps"]

TWIN = "fedbranch.flower.steps_compiled"
WORTH_COMPILING = 2**12  # parameters; with fewer, loading machine code would take longer
# How far behind the address of a bytes object its bytes begin, in CPython; Numba needs that too.
BYTES_BEGIN = bytes.__basicsize__ - 1


class _Usual(NamedTuple):
    """What the bytes of an array are like if nothing about them is unusual."""

    name: str
    header: bytes
    num_bytes: int


class Steps:
    """Reads the replies to one message.

    Where Numba is installed and parameters are float32, as nearly always, replies that came as
    Flower serialises them take one pass over their numbers, in which no thread waits for another.
    All others are read by :meth:`fedbranch.flower.arrays.Layout.write_update`, which gives the
    same bits.

    Parameters
    ----------
    layout
        Of the model.
    sent
        The model in the message.
    """

    def __init__(self, layout: Layout, sent: NamedArrays) -> None:
        self._layout = layout
        self._sent = sent
        params = [place.name for place in layout.places if not place.is_buffer]
        self._buffer_places = [place for place in layout.places if place.is_buffer]
        self._compiled = None
        if (
            layout.num_params >= WORTH_COMPILING
            and all(sent[name].dtype == np.float32 for name in params)
            and _are_bytes_where_expected()
        ):
            self._compiled = machine_code(TWIN)
        if self._compiled is not None:
            self._before = np.concatenate([sent[name].reshape(-1) for name in params])
            headers = [usual_header(sent[name].dtype, sent[name].shape) for name in params]
            self._usual = [
                _Usual(name, header, len(header) + sent[name].nbytes)
                for name, header in zip(params, headers, strict=True)
            ]
            self._header_lengths = np.array([len(header) for header in headers], np.uint64)
            self._lengths = np.array([sent[name].size for name in params], np.int64)

    def write(
        self,
        replies: Sequence[ArrayRecord],
        params: NDArray[np.float32],
        buffers: NDArray[np.float32],
    ) -> tuple[dict[int, str], Extent | None]:
        """Write down the updates.

        Parameters
        ----------
        replies
            The models that came back.
        params, buffers
            Where to write, one row for each: shape (num_replies, num_params) and (num_replies,
            num_buffers).

        Returns
        -------
        tuple
            Row -> why it cannot be read; it may then hold anything. And how long the updates
            are, if that was measured on the way.
        """
        rows: list[int] = []
        parts: list[bytes] = []
        problems = {}
        for row, reply in enumerate(replies):
            try:
                there = self._layout.named(reply)
                own = self._usual_parts(there)
                places = self._layout.places if own is None else self._buffer_places
                if places:
                    self._layout.write_places(places, self._sent, there, params[row], buffers[row])
                if own is not None:
                    rows.append(row)
                    parts += own
            except Exception as error:  # objects from outside may fail in ways of their own
                problems[row] = why_unreadable(error)
        extent = None
        if self._compiled is not None and rows:
            squares = np.zeros((len(replies), -(-len(self._before) // BLOCK)))
            # The list keeps what these are the addresses of.
            addresses = np.fromiter(map(id, parts), np.uint64, len(parts)) + np.uint64(BYTES_BEGIN)
            self._compiled.write_steps(
                addresses.reshape(len(rows), -1) + self._header_lengths,
                self._lengths,
                self._before,
                np.array(rows, np.int64),
                params,
                squares,
            )
            if len(rows) == len(replies):
                extent = extents_from(params, squares)
        return problems, extent

    def _usual_parts(self, there: Mapping[str, Array]) -> list[bytes] | None:
        """Give the bytes of all parameters, if these are as Flower serialises them."""
        if self._compiled is None:
            return None
        parts = []
        for name, header, num_bytes in self._usual:
            array = there[name]
            data = array.data
            if (
                type(data) is not bytes  # nothing else has an address that stays
                or len(data) != num_bytes
                or not data.startswith(header)
                or array.stype != NUMPY_FORMAT
            ):
                return None
            parts.append(data)
        return parts


@lru_cache
def _are_bytes_where_expected() -> bool:
    """Whether the number of a bytes object tells where its bytes are."""
    probe = b"fedbranch"
    return sys.implementation.name == "cpython" and (
        ctypes.string_at(id(probe) + BYTES_BEGIN, len(probe)) == probe
    )
