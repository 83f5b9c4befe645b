"""Models that the server does not know: hidden by a secret that only the clients share.

The server starts with zeros instead of a model, :func:`hidden_arrays`. Every client has
:func:`transform_mod` in front of its client app: it reveals what comes and hides what is sent.
:func:`reveal` returns the model to a member at the end. The strategy works as usual.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from numpy.typing import NDArray

from fedbranch.errors import AgreementFailed, ClientFailed, InvalidUpdate, TransformMismatch
from fedbranch.flower.arrays import HIDDEN_PARAMS, HIDDEN_PREFIX, Layout
from fedbranch.flower.half_updates import HALF_DIFFERENCE
from fedbranch.privacy import Kind, Secret, Transform
from fedbranch.types import Vector

__all__ = [
    "MESSAGE_TYPE",
    "RECORD",
    "ClientFunction",
    "InitialModel",
    "hidden_arrays",
    "masked",
    "reveal",
    "transform_mod",
]

Arrays: TypeAlias = ArrayRecord | Mapping[str, NDArray[Any]]
ClientFunction: TypeAlias = Callable[[Message, Context], Message]
Mod: TypeAlias = Callable[[Message, Context, ClientFunction], Message]
InitialModel: TypeAlias = Callable[[int], Arrays]
Vectors: TypeAlias = NDArray[np.floating[Any]]

REASON_KEPT = (
    "the client app replied with an error; its reason is not sent, because there may be private "
    "values in it"
)
INITIAL_MODEL = "initial model"  # the purpose for which its seed is derived
# The messages of the key agreement, which the server may see.
MESSAGE_TYPE = "query.fedbranch"
RECORD = "fedbranch-agreement"


def hidden_arrays(
    model: Arrays,
    kind: Kind = "rotation",
    *,
    fingerprint: str | None,
    buffers: Collection[str] | None = None,
) -> ArrayRecord:
    """Make the arrays that the server starts with when it is not to know the model.

    Parameters
    ----------
    model
        Arrays like those of the model; only shapes and dtypes are used.
    kind
        The same as in the clients' :func:`transform_mod`.
    fingerprint
        The fingerprint of the clients' secret, ``agreed.fingerprint`` or ``Secret.fingerprint``.
        Clients with another secret refuse to train, and another run is not mistaken for this
        one. With None it goes unnoticed if clients have different secrets, and the models make
        no sense.
    buffers
        Names of the arrays that are averaged but never compared. :class:`ClusteredStrategy` then
        needs no ``buffers``.

    Returns
    -------
    ArrayRecord
        Zeros. They are float64, so that the difference between a client's reply and the model
        sent is exactly its hidden update in float32.

    Examples
    --------
    >>> model = {"weight": np.empty((64, 10), np.float32)}
    >>> arrays = hidden_arrays(model, fingerprint="59b03ffd")
    >>> {name: (array.dtype, array.shape) for name, array in arrays.items()}
    {'fedbranch-hidden.rotation.59b03ffd.parameters': ('float64', (640,))}
    """
    zeros = {name: np.zeros_like(array) for name, array in _named(model).items()}
    placeholder = Secret(bytes(32), run="lengths only")  # lengths do not depend on the secret
    hiding = _Hiding.of(placeholder, _layout(zeros, buffers), kind)
    return hiding.hidden(fingerprint).initial_record


def transform_mod(
    secret: Secret | Callable[[Context], Secret],
    initial: InitialModel,
    *,
    kind: Kind = "rotation",
    buffers: Collection[str] | None = None,
) -> Mod:
    """Make a mod that keeps a client app's model from the server.

    It must be the first in the list, ``ClientApp(mods=[transform_mod(...), ...])``. Then it is
    the first to see what comes and the last to see what is sent. The mods after it, such as
    Flower's for clipping and noise, see the plain model, as the client app does.

    Parameters
    ----------
    secret
        The clients' secret, or a function that returns it for a context.
    initial
        Maps a seed, which follows from the secret, to the initial model. It must return the same
        numbers on every client.
    kind
        The transform; the same for all clients and the server.
    buffers
        Names of the arrays that are averaged but never compared, as for ``hidden_arrays``.

    Returns
    -------
    Mod
        It raises in these cases, and the client sends nothing but the reason:

        - There is no secret: the ``AgreementFailed`` that ``secret`` raises.
        - Arrays come that are not hidden in this way: ``TransformMismatch``.
        - The reply has arrays that it cannot hide, or a ``ConfigRecord``: ``TransformMismatch``.
        - ``secret``, ``initial`` or the client app raise anything else: ``ClientFailed``, without
          the message of that error, which might contain numbers.

        If the client app replies with an error, its code is sent and its reason is not.

    Examples
    --------
    ::

        app = ClientApp(mods=[transform_mod(agreement.secret, initial_model)])
    """
    if not (isinstance(secret, Secret) or callable(secret)):
        raise TypeError(
            f"secret is of type {type(secret).__name__}; pass a Secret, or a function that maps "
            "the context to one"
        )
    if not callable(initial):
        raise TypeError(
            f"initial is of type {type(initial).__name__}; pass a function that maps a seed to the "
            "initial model"
        )
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; it must be one of {get_args(Kind)}")
    names = None if buffers is None else frozenset(buffers)

    def mod(message: Message, context: Context, call_next: ClientFunction) -> Message:
        key, received = "", None
        if message.has_content() and message.content.array_records:
            key, record = _only(message.content.array_records)
            with masked("the function that gives the secret"):
                known = secret if isinstance(secret, Secret) else secret(context)
                if not isinstance(known, Secret):
                    raise _WrongType(
                        f"the function that gives the secret returned {type(known).__name__}; it "
                        "must return a Secret, or raise an error if there is none"
                    )
            with masked("the function that gives the initial model"):
                hiding = _hiding(known, initial, kind, names)
            with masked("revealing the model"):
                received = hiding.received(record)
                message.content = RecordDict({**message.content, key: received.plain})
        with masked("the client app"):
            reply = call_next(message, context)
        with masked("hiding the reply"):
            if not isinstance(reply, Message):
                raise _WrongType(
                    f"the client app replied with {type(reply).__name__}; it must be a Message"
                )
            if reply.has_error():
                return Message(Error(reply.error.code, REASON_KEPT), reply_to=message)
            if reply.has_content():
                is_agreement = message.metadata.message_type == MESSAGE_TYPE
                _check_config(reply.content, {RECORD} if is_agreement else set())
                if reply.content.array_records:
                    reply.content = _hidden_reply(reply.content, key, received)
        return reply

    return mod


def reveal(
    arrays: ArrayRecord,
    secret: Secret,
    initial: InitialModel,
    *,
    kind: Kind = "rotation",
    buffers: Collection[str] | None = None,
) -> ArrayRecord:
    """Return the model behind hidden arrays, such as ``result.arrays_of(client_id)``, to a member.

    Parameters
    ----------
    arrays
        The arrays that the server has.
    secret, initial, kind, buffers
        As for :func:`transform_mod`.

    Raises
    ------
    TransformMismatch
        If the arrays were not hidden in this way.
    """
    return _Hiding.from_initial(secret, initial, kind, buffers).received(arrays).plain


@dataclass(frozen=True)
class _Hiding:
    """A model as the members know it, and as the server sees it."""

    secret: Secret
    kind: Kind
    layout: Layout  # with the initial model
    transform: Transform

    @classmethod
    def of(cls, secret: Secret, layout: Layout, kind: Kind) -> _Hiding:
        num_whole = int(layout.whole_buffers.sum())
        transform = Transform.of(
            secret,
            kind,
            num_params=layout.num_params,
            num_buffers=layout.num_buffers - num_whole,
            num_counters=num_whole,
        )
        return cls(secret, kind, layout, transform)

    @classmethod
    def from_initial(
        cls, secret: Secret, initial: InitialModel, kind: Kind, buffers: Collection[str] | None
    ) -> _Hiding:
        model = _named(initial(secret.seed(INITIAL_MODEL)))
        try:
            layout = _layout(model, buffers)
        except (TypeError, ValueError) as error:  # its message quotes names, and no numbers
            raise TransformMismatch(f"the initial model cannot be hidden: {error}") from None
        return cls.of(secret, layout, kind)

    def hidden(self, fingerprint: str | None) -> Layout:
        """Return the layout that the server sees; its initial model is zeros."""
        prefix = ".".join([HIDDEN_PREFIX, self.kind, *([fingerprint] if fingerprint else [])])
        lengths = {
            HIDDEN_PARAMS: self.transform.params.num_hidden,
            "buffers": self.transform.buffers.num_hidden,
            "counters": self.transform.counters.num_hidden,
        }
        zeros = {f"{prefix}.{name}": np.zeros(n) for name, n in lengths.items() if n}
        return _layout(zeros, None)

    @cached_property
    def accepted(self) -> list[Layout]:
        """The layouts that the server may send: with the name of the secret, or without it."""
        return [self.hidden(self.secret.fingerprint), self.hidden(None)]

    def received(self, record: ArrayRecord) -> _Received:
        """Reveal what the server sent.

        Raises
        ------
        TransformMismatch
            If it is not hidden in this way.
        """
        hidden = next((one for one in self.accepted if set(one.initial) <= set(record)), None)
        if hidden is None:
            raise TransformMismatch(
                f"the server sent the arrays {list(record)[:5]}; this client, of "
                f"{self.secret}, expects {list(self.accepted[0].initial)}. Its server app must "
                "start with hidden_arrays(...) of the same kind, model, buffers and secret"
            )
        params = np.empty(hidden.num_params, np.float32)
        buffers = np.empty(hidden.num_buffers, np.float32)
        try:
            hidden.write_update(hidden.initial, record, params, buffers)
        except InvalidUpdate as error:
            raise TransformMismatch(
                f"the server sent another model than this client has: {error}. Give "
                "hidden_arrays(...) and transform_mod(...) the same model and buffers"
            ) from None
        return _Received(self, hidden, params, buffers)

    def revealed_buffers(self, hidden: Vector) -> Vector:
        """Return the plain displacement of buffers; whole numbers are rounded later."""
        statistics, counters = np.split(
            hidden.astype(np.float64), [self.transform.buffers.num_hidden]
        )
        are_whole = self.layout.whole_buffers
        plain = np.empty(self.layout.num_buffers, np.float32)
        plain[~are_whole] = self.transform.buffers.reveal(statistics)
        plain[are_whole] = self.transform.counters.reveal(counters)
        return plain

    def hidden_buffers(self, plain: Vector) -> Vectors:
        are_whole = self.layout.whole_buffers
        wide = plain.astype(np.float64)
        return np.concatenate(
            [
                self.transform.buffers.hide(wide[~are_whole]),
                self.transform.counters.hide(wide[are_whole]),
            ]
        )


@dataclass(frozen=True)
class _Received:
    """The model from the server, as displacements from the initial model, still hidden."""

    hiding: _Hiding
    layout: Layout
    params: Vector
    buffers: Vector

    @cached_property
    def plain(self) -> ArrayRecord:
        """The model that it stands for."""
        # As float32 before the initial model is added, so that a permutation changes no bit.
        params = self.hiding.transform.params.reveal(self.params.astype(np.float64))
        buffers = self.hiding.revealed_buffers(self.buffers)
        layout = self.hiding.layout
        return layout.record(layout.arrays_at(params.astype(np.float32), buffers))

    def answered_by(self, reply: ArrayRecord) -> ArrayRecord:
        """Hide the model that the client app replied with."""
        layout = self.hiding.layout
        params = np.empty(layout.num_params, np.float32)
        buffers = np.empty(layout.num_buffers, np.float32)
        sent = {name: array.numpy() for name, array in self.plain.items()}
        layout.write_update(sent, reply, params, buffers)
        after_params = self.params + self.hiding.transform.params.hide(params.astype(np.float64))
        after_buffers = self.buffers + self.hiding.hidden_buffers(buffers)
        return self._record(after_params, after_buffers)

    def with_half_difference(self, reply: ArrayRecord) -> ArrayRecord:
        """Hide the half difference that the client app replied with."""
        params = self.hiding.layout.params_in(reply).astype(np.float64)
        no_buffers = np.zeros(self.layout.num_buffers)
        return self._record(self.hiding.transform.params.hide(params), no_buffers)

    def _record(self, params: Vectors, buffers: Vectors) -> ArrayRecord:
        """Put hidden vectors into the arrays that the server knows."""
        arrays = {}
        for name, zeros in self.layout.initial.items():
            if name in self.layout.buffer_names:
                arrays[name], buffers = buffers[: zeros.size], buffers[zeros.size :]
            else:
                arrays[name] = params
        return self.layout.record(arrays)


@lru_cache(maxsize=1)  # the same from message to message
def _hiding(
    secret: Secret, initial: InitialModel, kind: Kind, buffers: frozenset[str] | None
) -> _Hiding:
    return _Hiding.from_initial(secret, initial, kind, buffers)


def _check_config(content: RecordDict, allowed: Collection[str]) -> None:
    found = [key for key in content.config_records if key not in allowed]
    if found:
        raise TransformMismatch(
            f"the reply has config records under {found}. They are not sent, because they cannot "
            "be hidden and may hold anything; reply with arrays and metrics only"
        )


def _hidden_reply(content: RecordDict, key: str, received: _Received | None) -> RecordDict:
    """Hide all arrays of a reply, or refuse to send it."""
    if received is None:
        raise TransformMismatch(
            "the client app replies with arrays to a message without any; they are not sent, "
            "because they cannot be hidden"
        )
    records = dict(content.array_records)
    half_key = HALF_DIFFERENCE.format(key)
    half = records.pop(half_key, None)
    if list(records) != [key]:
        raise TransformMismatch(
            f"the reply has array records under {list(content.array_records)}; the model belongs "
            f"under {key!r} as it came, half the difference under {half_key!r}. Others are not "
            "sent, because they cannot be hidden"
        )
    hidden = {}
    try:
        if half is not None:
            hidden[half_key] = received.with_half_difference(half)
        hidden[key] = received.answered_by(records[key])
    except InvalidUpdate as error:  # its message quotes names, dtypes and shapes, and no numbers
        raise TransformMismatch(
            f"the client app replied with another model than it got: {error}"
        ) from None
    return RecordDict({**content, **hidden})


def _only(records: Mapping[str, ArrayRecord]) -> tuple[str, ArrayRecord]:
    if len(records) != 1:
        raise TransformMismatch(
            f"the server sent array records under {list(records)}; there must be one, of hidden "
            "arrays"
        )
    return next(iter(records.items()))


class _WrongType(TypeError):
    """Something is of a wrong type; the message names types only and may be sent."""


@contextmanager
def masked(what: str) -> Iterator[None]:
    """Keep the messages of errors from the server, except those that are worded here."""
    try:
        yield
    except (AgreementFailed, TransformMismatch, _WrongType):  # they quote no private values
        raise
    except Exception as error:
        raise ClientFailed(f"{what} raised {_without_its_message(error)}") from None


def _without_its_message(error: Exception) -> str:
    """Return what was raised and where: it helps to find the error and contains no numbers."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno} "
        f"({frame.name}); its message is not sent, because there may be private values in it"
    )


def _layout(arrays: Mapping[str, NDArray[Any]], buffers: Collection[str] | None) -> Layout:
    return Layout.of(ArrayRecord({name: Array(a) for name, a in arrays.items()}), buffers)


def _named(arrays: Arrays) -> dict[str, NDArray[Any]]:
    if isinstance(arrays, ArrayRecord):
        return {name: array.numpy() for name, array in arrays.items()}
    if not isinstance(arrays, Mapping):
        raise _WrongType(
            f"the model is of type {type(arrays).__name__}; it must be an ArrayRecord, or arrays "
            "by name"
        )
    return {name: np.asarray(array) for name, array in arrays.items()}
