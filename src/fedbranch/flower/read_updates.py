"""The updates in many replies to one message: what came back minus what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.flower.arrays import NUMPY_FORMAT, Layout, NamedArrays, usual_header
from fedbranch.flower.replies import why_unreadable

__all__ = ["Read", "Steps"]

WORTH_COMPILING = 2**12  # parameters; with fewer, loading machine code would take longer


class Read(NamedTuple):
    """Replies that could be read, one row each.

    Attributes
    ----------
    places
        Which of the replies they are.
    params
        Shape (num_rows, num_params): the updates, or where their numbers lie.
    buffers
        Shape (num_rows, num_buffers).
    """

    places: list[int]
    params: NDArray[np.float32] | Differences
    buffers: NDArray[np.float32]


class _Usual(NamedTuple):
    """What the bytes of the parameters are like, array by array, if nothing is unusual."""

    names: list[str]
    headers: list[bytes]
    num_bytes: list[int]


class Steps:
    """Reads the replies to one message.

    Where Numba is installed and parameters are float32, as nearly always, replies that came as
    Flower serialises them are left where they are, and machine code goes over them there. All
    others are read by :meth:`fedbranch.flower.arrays.Layout.write_update`, which gives the same
    bits.

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
        self._usual: _Usual | None = None
        if (
            layout.num_params >= WORTH_COMPILING
            and all(sent[name].dtype == np.float32 for name in params)
            and Differences.can_be_read()
        ):
            self._before = np.concatenate([sent[name].reshape(-1) for name in params])
            headers = [usual_header(sent[name].dtype, sent[name].shape) for name in params]
            self._offsets = [len(header) for header in headers]
            self._lengths = [sent[name].size for name in params]
            num_bytes = [
                offset + sent[name].nbytes
                for name, offset in zip(params, self._offsets, strict=True)
            ]
            self._usual = _Usual(params, headers, num_bytes)

    def read(self, replies: Sequence[ArrayRecord]) -> tuple[list[Read], dict[int, str]]:
        """Read the updates.

        Parameters
        ----------
        replies
            The models that came back.

        Returns
        -------
        tuple
            Those that could be read, in at most two parts, and place -> why it cannot be read
            of the others.
        """
        usual: list[int] = []
        pieces: list[bytes] = []
        unusual: list[int] = []
        params = np.zeros((0, self._layout.num_params), np.float32)
        buffers = np.zeros((len(replies), self._layout.num_buffers), np.float32)
        problems = {}
        for place, reply in enumerate(replies):
            try:
                there = self._layout.named(reply)
                own = self._usual_pieces(there)
                if own is None:
                    if not len(params):
                        params = np.zeros((len(replies), self._layout.num_params), np.float32)
                    self._layout.write_places(
                        self._layout.places, self._sent, there, params[place], buffers[place]
                    )
                    unusual.append(place)
                    continue
                if self._buffer_places:
                    self._layout.write_places(
                        self._buffer_places, self._sent, there, params, buffers[place]
                    )
                usual.append(place)
                pieces += own
            except Exception as error:  # objects from outside may fail in ways of their own
                problems[place] = why_unreadable(error)
        parts = []
        if usual:
            differences = Differences(pieces, self._offsets, self._lengths, self._before)
            parts.append(Read(usual, differences, buffers[usual]))
        if unusual:
            parts.append(Read(unusual, params[unusual], buffers[unusual]))
        return parts, problems

    def _usual_pieces(self, there: Mapping[str, Array]) -> list[bytes] | None:
        """Give the bytes of all parameters, if these are as Flower serialises them."""
        usual = self._usual
        if usual is None:
            return None
        arrays = [there[name] for name in usual.names]
        pieces = [array.data for array in arrays]
        # All of them at once: there may be many arrays, and a thousand replies.
        is_usual = (
            set(map(type, pieces)) == {bytes}  # nothing else has an address that stays
            and list(map(len, pieces)) == usual.num_bytes
            and all(map(bytes.startswith, pieces, usual.headers))
            and {array.stype for array in arrays} == {NUMPY_FORMAT}
        )
        return pieces if is_usual else None
