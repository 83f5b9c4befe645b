"""What the server sees of updates under each transform."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct

from fedbranch.privacy import Permutation, Rotation, Secret

__all__ = ["VIEWS", "View", "seen_apart", "seen_together"]

# "signs" is the control: secret signs and a cosine transform without a secret order. It looks
# mixed, is worse than a permutation, and is not shipped. "collusion" is a rotation with a
# secret that one client has given to the server.
View: TypeAlias = Literal["none", "permutation", "rotation", "signs", "collusion"]
VIEWS: tuple[View, ...] = get_args(View)
Numbers: TypeAlias = NDArray[np.floating[Any]]


def seen_together(view: View, vectors: Numbers, seed: int) -> Numbers:
    """Hide all rows by one secret, as in one run.

    Parameters
    ----------
    vectors
        Shape (rows, num_plain).

    Returns
    -------
    NDArray
        Shape (rows, num_hidden), with num_hidden at least num_plain.
    """
    return _hiding(view, vectors.shape[-1], seed, 0)(vectors)


def seen_apart(view: View, vectors: Numbers, seed: int) -> Numbers:
    """Hide each row by a secret of its own, as in separate runs.

    A result then does not depend on luck with one secret. Shapes are those of
    :func:`seen_together`.
    """
    size = vectors.shape[-1]
    return np.stack([_hiding(view, size, seed, row)(v) for row, v in enumerate(vectors)])


def _hiding(view: View, size: int, seed: int, number: int) -> Callable[[Numbers], Numbers]:
    # The audit must be repeatable, so its secrets follow from its seed.
    key = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=32).digest()
    secret = Secret(key, run="audit")
    rotation = Rotation(secret, size, "rotation of parameters")
    match view:
        case "none":
            return lambda vectors: vectors
        case "permutation":
            return Permutation(secret, size, "permutation of parameters").hide
        case "rotation":
            return rotation.hide
        case "signs":
            return lambda vectors: dct(
                vectors * rotation.signs, n=rotation.num_hidden, norm="ortho"
            ).astype(vectors.dtype)
        case "collusion":
            return lambda vectors: rotation.reveal(rotation.hide(vectors))
