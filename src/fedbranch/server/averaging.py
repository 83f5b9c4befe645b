"""How the replies of a cluster become one step: weights, clipping, and the aggregate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.geometry import to_numpy
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.reply import Reply
from fedbranch.types import Array, Vector

__all__ = ["aggregated", "beside", "locked", "weights_of"]


def weights_of(replies: Sequence[Reply], options: ServerOptions, like: Array) -> Array:
    """Return what each reply counts for, shape (num_replies,), on the device of ``like``."""
    counts = np.array(
        [reply.weight if options.weighting == "examples" else 1.0 for reply in replies]
    )
    guard = options.guard
    return locked(beside(like, counts if guard is None else guard.weights(counts)))


def aggregated(
    updates: Array,
    weights: Array,
    options: ServerOptions,
    *,
    clips: bool = True,
    lengths: NDArray[np.float64] | None = None,
) -> Vector:
    """Aggregate, and check that the result can be added to parameters.

    Parameters
    ----------
    updates, weights
        Shapes (num_replies, dim) and (num_replies,).
    options
        Have the aggregate, and the guard that limits how long an update may count.
    clips
        Whether that limit holds here.
    lengths
        Of the updates, where they are known.

    Raises
    ------
    ValueError
        If the aggregate returns anything but ``dim`` finite floating-point numbers.
    """
    if clips and options.guard is not None:
        updates = options.guard.clipped(updates, lengths)
    updates = locked(updates)
    step = to_numpy(options.aggregate(updates, weights))
    if step.shape != updates.shape[1:] or not np.issubdtype(step.dtype, np.floating):
        raise ValueError(
            f"the aggregate returned shape {step.shape} and dtype {step.dtype} for updates of "
            f"shape {updates.shape}; it must return {updates.shape[1:]}, floating"
        )
    if not np.isfinite(step).all():
        raise ValueError("the aggregate returned NaN or infinity for finite updates")
    return np.array(step, dtype=np.float32)


def beside(updates: Array, vector: Array) -> Array:
    """Bring a vector to the device of the updates."""
    there: Array = array_namespace(updates).asarray(vector, device=device(updates))
    return there


def locked(array: Array) -> Array:
    """Return a view that users' functions can read but not sort or scale in place.

    Tensors of other libraries cannot be locked.
    """
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array
