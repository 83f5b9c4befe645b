"""The updates in many replies to one message: what came back minus what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.flower.arrays import NUMPY_FORMAT, Layout, NamedArrays, usual_header
from fedbranch.flower.reply_content import why_unreadable

__all__ = ["UpdateReader", "UpdateRows"]

# With fewer parameters, loading machine code would take longer than it saves.
MOST_PARAMS_WITHOUT_MACHINE_CODE = 2**12 - 1


class UpdateRows(NamedTuple):
    """The updates in replies that could be read, one row each.

    Attributes
    ----------
    places
        The replies' places among those that were to be read.
    params
        Shape (num_rows, num_params): the updates, or the memory in which their numbers are.
    buffers
        Shape (num_rows, num_buffers).
    """

    places: list[int]
    params: NDArray[np.float32] | Differences
    buffers: NDArray[np.float32]


class _UsualBytes(NamedTuple):
    """The bytes of the parameters as Flower serialises them, array by array."""

    names: list[str]
    headers: list[bytes]
    num_bytes: list[int]


class UpdateReader:
    """Reads the updates in replies to one model.

    Where Numba is installed and parameters are float32, as nearly always, replies that came as
    Flower serialises them are not copied: machine code computes with their bytes. All others are
    read by :meth:`fedbranch.flower.arrays.Layout.write_update`. The bits are the same.

    Parameters
    ----------
    layout
        The layout of the model.
    sent
        The model in the message.
    most_params_without_machine_code
        Models with at most this number of parameters are read by NumPy.
    """

    def __init__(
        self,
        layout: Layout,
        sent: NamedArrays,
        *,
        most_params_without_machine_code: int = MOST_PARAMS_WITHOUT_MACHINE_CODE,
    ) -> None:
        self._layout = layout
        self._sent = sent
        params = [place.name for place in layout.places if not place.is_buffer]
        self._buffer_places = [place for place in layout.places if place.is_buffer]
        self._usual: _UsualBytes | None = None
        if (
            layout.num_params > most_params_without_machine_code
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
            self._usual = _UsualBytes(params, headers, num_bytes)

    def read(self, replies: Sequence[ArrayRecord]) -> tuple[list[UpdateRows], dict[int, str]]:
        """Read the updates.

        Parameters
        ----------
        replies
            The models that came back.

        Returns
        -------
        tuple
            The rows of those that could be read, in at most two parts; and for the others place
            -> why it cannot be read.
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
            parts.append(UpdateRows(usual, differences, buffers[usual]))
        if unusual:
            parts.append(UpdateRows(unusual, params[unusual], buffers[unusual]))
        return parts, problems

    def _usual_pieces(self, there: Mapping[str, Array]) -> list[bytes] | None:
        """Return the bytes of all parameters; None if Flower would serialise them otherwise."""
        usual = self._usual
        if usual is None:
            return None
        arrays = [there[name] for name in usual.names]
        pieces = [array.data for array in arrays]
        # All arrays at once: there may be many, in a thousand replies.
        is_usual = (
            set(map(type, pieces)) == {bytes}  # the bytes of no other type stay at their address
            and list(map(len, pieces)) == usual.num_bytes
            and all(map(bytes.startswith, pieces, usual.headers))
            and {array.stype for array in arrays} == {NUMPY_FORMAT}
        )
        return pieces if is_usual else None
