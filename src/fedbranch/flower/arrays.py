"""A model's named arrays, and their places in the server's two vectors.

The server knows displacements from the initial model: parameters and buffers, each as one
float32 vector. A Flower message carries named arrays of any shape and dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedbranch.errors import DamagedFile, InvalidUpdate
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON, Vector

__all__ = [
    "HIDDEN_PARAMS",
    "HIDDEN_PREFIX",
    "NUMPY_FORMAT",
    "Layout",
    "NamedArrays",
    "Place",
    "usual_header",
]

NamedArrays = dict[str, NDArray[Any]]

# What PyTorch calls the statistics of its normalisation layers.
BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")
# The names of arrays that stand for a model which the server does not know.
HIDDEN_PREFIX, HIDDEN_PARAMS = "fedbranch-hidden", "parameters"
# A displacement of a whole number beyond this makes no sense, and would not fit into 64 bits.
LARGEST_WHOLE_STEP = float(2**62)
HEADER_BYTES = 1024  # before the numbers of an array; NumPy writes 128 as a rule
MORE_REPLY_BYTES = 2**20
# How Flower serialises arrays: as NumPy's files.
NUMPY_FORMAT = "numpy.ndarray"
READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Place(NamedTuple):
    """The place of an array in the server's vectors."""

    name: str
    within: slice
    is_buffer: bool


@dataclass(frozen=True)
class Layout:
    """The arrays of a model: their names and initial values, and which of them are buffers.

    Attributes
    ----------
    initial
        Name -> array of the initial model θ0.
    buffer_names
        The arrays that are averaged but never compared.
    """

    initial: NamedArrays
    buffer_names: frozenset[str]

    @classmethod
    def of(cls, record: ArrayRecord, buffers: Collection[str] | None = None) -> Layout:
        """Read the initial model from a record.

        Parameters
        ----------
        record
            The initial model.
        buffers
            Names of the arrays that are averaged but never compared. By default whole
            numbers and truth values, and what PyTorch's normalisation layers keep beside
            their parameters; of hidden arrays, all but the parameters.
        """
        initial = {name: array.numpy() for name, array in record.items()}
        for name, array in initial.items():
            # Only what every machine and file format knows: no longdouble, no text, no objects.
            if array.dtype.kind not in "biufc" or array.dtype.itemsize > 8 << (
                array.dtype.kind == "c"
            ):
                raise TypeError(
                    f"the array {name!r} has dtype {array.dtype}; a model's arrays hold numbers "
                    "of at most 64 bits"
                )
            initial[name] = np.array(array, dtype=array.dtype.newbyteorder("="))
        if buffers is None:
            names = {
                name
                for name, array in initial.items()
                if array.dtype.kind in "biu"
                or name.rsplit(".", 1)[-1] in BUFFER_SUFFIXES
                or (_is_hidden(name) and not name.endswith(HIDDEN_PARAMS))
            }
        else:
            names = set(buffers)
            unknown = sorted(names - initial.keys())
            if unknown:
                raise ValueError(
                    f"buffers names {unknown}, which the model does not have; its arrays are "
                    f"{list(initial)}"
                )
            whole = [n for n, a in initial.items() if a.dtype.kind in "biu" and n not in names]
            if whole:
                raise ValueError(
                    f"the arrays {whole} hold whole numbers, which cannot be trained; name them "
                    "among the buffers"
                )
        layout = cls(initial, frozenset(names))
        for name, array in layout._parts(are_buffers=False):
            if not np.isfinite(array).all():
                raise ValueError(
                    f"the array {name!r} of the initial model contains NaN or infinity; if it is "
                    f"not trained, name it among the buffers: buffers=[{name!r}, ...]"
                )
        if not layout.num_params:
            raise ValueError(
                f"the initial model has no parameters; its arrays are {list(initial)}, of which "
                f"{sorted(names)} are buffers"
            )
        return layout

    @cached_property
    def num_params(self) -> int:
        """Length of the vector of parameters."""
        return sum(_num_real(array) for _, array in self._parts(are_buffers=False))

    @cached_property
    def num_buffers(self) -> int:
        """Length of the vector of buffers."""
        return sum(_num_real(array) for _, array in self._parts(are_buffers=True))

    @cached_property
    def most_reply_bytes(self) -> int:
        """The most bytes that the arrays of a reply may take.

        The model, its half difference, and twice the model for other arrays that a client app
        may send; each array with a header. A constant is added for small models.
        """
        model = sum(array.nbytes + HEADER_BYTES for array in self.initial.values())
        return 4 * model + MORE_REPLY_BYTES

    @property
    def is_hidden(self) -> bool:
        """Return whether the arrays stand for a hidden model; see :mod:`fedbranch.flower.hidden`."""
        return any(map(_is_hidden, self.initial))

    @property
    def whole_buffers(self) -> NDArray[np.bool_]:
        """Return a mask of the entries of buffers that are whole numbers or truth values."""
        parts = [
            np.full(_num_real(array), array.dtype.kind in "biu")
            for _, array in self._parts(are_buffers=True)
        ]
        return np.concatenate([np.zeros(0, bool), *parts])

    def _parts(self, *, are_buffers: bool) -> Iterator[tuple[str, NDArray[Any]]]:
        """Iterate over the arrays of one vector, in its order."""
        return (
            (name, array)
            for name, array in self.initial.items()
            if (name in self.buffer_names) == are_buffers
        )

    def describe(self) -> JSON:
        """Describe the model's arrays: name -> dtype and shape."""
        return {
            name: f"{array.dtype} {list(array.shape)}{' buffer' * (name in self.buffer_names)}"
            for name, array in self.initial.items()
        }

    # From the server to the clients

    def arrays_at(self, params: Vector, buffers: Vector) -> NamedArrays:
        """Return the model at these displacements, every array in its own dtype."""
        moved = {}
        for vector, are_buffers in [(params, False), (buffers, True)]:
            start = 0
            for name, array in self._parts(are_buffers=are_buffers):
                step = vector[start : start + _num_real(array)]
                moved[name] = _moved(array, step)
                start += len(step)
        return {name: moved[name] for name in self.initial}

    @property
    def initial_record(self) -> ArrayRecord:
        """The initial model, as it can be sent."""
        return self.record(self.initial)

    def record(self, arrays: NamedArrays) -> ArrayRecord:
        """Put arrays into a record that can be sent."""
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})

    # From the clients to the server

    def write_update(
        self, sent: NamedArrays, reply: ArrayRecord, params: Vector, buffers: Vector
    ) -> None:
        """Write down a client's update: what it sent back minus what it was sent.

        Parameters
        ----------
        sent
            The model that the client was sent.
        reply
            The model that it sent back.
        params, buffers
            The update is written here: shape (num_params,) and (num_buffers,).

        Raises
        ------
        InvalidUpdate
            If the reply's arrays are not those of the model; the message names one.
        """
        self.write_places(self.places, sent, self.named(reply), params, buffers)

    def named(self, reply: ArrayRecord) -> dict[str, Array]:
        """Return the arrays of a reply by name.

        Raises
        ------
        InvalidUpdate
            If they are not the model's.
        """
        there = dict(reply.items())
        # Nearly always in the same order, which is quickly checked.
        if list(there) != list(self.initial) and there.keys() != self.initial.keys():
            missing = sorted(self.initial.keys() - there.keys())
            extra = sorted(there.keys() - self.initial.keys())
            raise InvalidUpdate(
                f"the reply's arrays are not the model's: missing {missing[:5]}, "
                f"unknown {extra[:5]}"
            )
        return there

    def write_places(
        self,
        places: Sequence[Place],
        sent: NamedArrays,
        there: Mapping[str, Array],
        params: Vector,
        buffers: Vector,
    ) -> None:
        """Write the differences of some of the arrays, or of none if one of them is wrong."""
        received = [
            (_real(sent[name]), _received(name, sent[name], there[name]), place, is_buffer)
            for name, place, is_buffer in places
        ]
        with np.errstate(invalid="ignore", over="ignore"):
            for before, after, place, is_buffer in received:
                vector = buffers if is_buffer else params
                _write_step(before, after, vector[place])
                if is_buffer and before.dtype.kind == "f":
                    # An infinity or NaN that stays has moved by 0, not by NaN.
                    stays = (after == before) | (np.isnan(after) & np.isnan(before))
                    vector[place][stays] = 0

    @cached_property
    def places(self) -> list[Place]:
        """The place of every array, parameters before buffers."""
        places = []
        for are_buffers in (False, True):
            start = 0
            for name, array in self._parts(are_buffers=are_buffers):
                end = start + _num_real(array)
                places.append(Place(name, slice(start, end), are_buffers))
                start = end
        return places

    def params_in(self, record: ArrayRecord) -> Vector:
        """Read a vector of parameters that came in the shape of the model; buffers are ignored.

        Raises
        ------
        InvalidUpdate
            If the arrays are not like those of the model; the message names one.
        """
        missing = sorted(name for name, _ in self._parts(are_buffers=False) if name not in record)
        if missing:
            raise InvalidUpdate(f"the half difference lacks the arrays {missing[:5]}")
        parts = [
            _received(name, array, record[name]) for name, array in self._parts(are_buffers=False)
        ]
        with np.errstate(over="ignore"):
            return np.concatenate([part.astype(np.float32) for part in parts])

    # Files

    def to_state(self) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the initial model as JSON and tensors, for a checkpoint."""
        state = {
            "arrays": [
                {"name": name, "dtype": array.dtype.str, "shape": list(array.shape)}
                for name, array in self.initial.items()
            ],
            "buffers": sorted(self.buffer_names),
        }
        # By number: a name may be one that the file format reserves.
        numbered = {str(i): _real(array) for i, array in enumerate(self.initial.values())}
        return state, {"arrays": numbered}

    @classmethod
    def from_state(cls, state: JSON, files: dict[str, Tensors]) -> Layout:
        """Rebuild a layout from what :meth:`to_state` returned."""
        try:
            initial = {
                entry["name"]: files["arrays"][str(i)]
                .view(np.dtype(entry["dtype"]))
                .reshape(entry["shape"])
                for i, entry in enumerate(state["arrays"])
            }
            return cls(initial, frozenset(state["buffers"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"the saved initial model contradicts itself: {error!r}") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(f"{HIDDEN_PREFIX}.")


def _real(array: NDArray[Any]) -> NDArray[Any]:
    """View an array as a vector of real numbers, complex ones as pairs."""
    if array.dtype.kind != "c" and array.flags.c_contiguous:
        if array.ndim == 1:
            return array
        return array.reshape(-1)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat


def _num_real(array: NDArray[Any]) -> int:
    return array.size * (2 if array.dtype.kind == "c" else 1)


def _moved(initial: NDArray[Any], step: Vector) -> NDArray[Any]:
    """Displace an array; whole numbers and truth values go to the nearest one."""
    flat = _real(initial)
    match flat.dtype.kind:
        case "f":
            moved = (flat + step).astype(flat.dtype)
        case "b":
            moved = flat + step >= 0.5
        case _:
            # In whole numbers, because a float could not hold large ones.
            whole = np.clip(
                np.rint(step.astype(np.float64)), -LARGEST_WHOLE_STEP, LARGEST_WHOLE_STEP
            )
            moved = flat + whole.astype(np.int64).astype(flat.dtype)
    return moved.view(initial.dtype).reshape(initial.shape)


def _received(name: str, sent: NDArray[Any], reply: Array) -> NDArray[Any]:
    """View the array that came back as a vector of real numbers, if it is like the one sent.

    Nothing is copied, and no memory is allocated because a reply's header asks for it.
    """
    if reply.stype != NUMPY_FORMAT:
        raise InvalidUpdate(f"the array {name!r} is serialised as {reply.stype!r}")
    data, dtype = reply.data, sent.dtype
    usual = usual_header(dtype, sent.shape)
    if len(data) == len(usual) + sent.nbytes and data.startswith(usual):
        flat = np.frombuffer(data, dtype, -1, len(usual))
        return _real(flat) if dtype.kind == "c" else flat
    return _real(_read(name, sent, reply))


def _read(name: str, sent: NDArray[Any], reply: Array) -> NDArray[Any]:
    """View an array in the bytes of the reply, and check what NumPy's header says about it."""
    try:
        stream = BytesIO(reply.data)
        read_header = READ_HEADER[np.lib.format.read_magic(stream)]
        shape, is_fortran, dtype = read_header(stream)
    except Exception as error:  # arbitrary bytes can make NumPy raise anything
        # Its message may quote the bytes, and these may be private.
        raise InvalidUpdate(
            f"the array {name!r} cannot be read as NumPy's format: {type(error).__name__}"
        ) from error
    if dtype != sent.dtype or shape != sent.shape:
        raise InvalidUpdate(
            f"the array {name!r} has dtype {dtype} and shape {shape}; "
            f"send {sent.dtype} and {sent.shape}"
        )
    num_bytes = len(reply.data) - stream.tell()
    if num_bytes != sent.nbytes:
        raise InvalidUpdate(
            f"the array {name!r} came with {num_bytes} bytes; it needs {sent.nbytes}"
        )
    flat = np.frombuffer(reply.data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


@lru_cache(maxsize=4096)
def usual_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what NumPy writes before the numbers of such an array; to read it takes long."""
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(
        stream,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape},
    )
    return stream.getvalue()


def _write_step(before: NDArray[Any], after: NDArray[Any], step: Vector) -> None:
    """Write the difference of two vectors; overflows are for the server to refuse."""
    if before.dtype == after.dtype == step.dtype:
        np.subtract(after, before, out=step)
        return
    if before.dtype.kind in "iu":
        # Modulo 2^64, so that no difference of large numbers is rounded.
        step[:] = after.astype(np.int64) - before.astype(np.int64)
        return
    wide = np.result_type(before.dtype, np.float32)
    np.subtract(after, before, out=step, dtype=wide, casting="same_kind")
