"""Half updates in Flower messages, for client apps that can send more evidence.

In some rounds the strategy puts a number under ``fedbranch-halves`` into the configuration of
training. A client app that knows this entry trains twice from the model that came: on the two
halves that :func:`fedbranch.training.half_split.half_rows` returns for the number. It replies
with what :func:`with_halves` makes of the two models. Evaluations may have the same number, with
``fedbranch-half`` beside it: ``first`` or ``second``, the half to evaluate on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

__all__ = ["HALF_DIFFERENCE", "HALF_KEY", "HALVES_KEY", "with_halves"]

HALVES_KEY, HALF_KEY = "fedbranch-halves", "fedbranch-half"
HALF_DIFFERENCE = "{}-half-difference"  # beside the record of the model


def with_halves(
    after_first: Mapping[str, NDArray[Any]],
    after_second: Mapping[str, NDArray[Any]],
    arrayrecord_key: str = "arrays",
) -> dict[str, ArrayRecord]:
    """Make the records of a reply from two models, each trained on one half of the data.

    Parameters
    ----------
    after_first, after_second
        Name -> array of each model.
    arrayrecord_key
        The strategy's ``arrayrecord_key``.

    Returns
    -------
    dict
        The mean of the models under the key, and half their difference beside it. Add the
        metrics, and send both.

    Examples
    --------
    >>> records = with_halves({"w": np.float32([1.0, 3.0])}, {"w": np.float32([2.0, 1.0])})
    >>> {name: record["w"].numpy().tolist() for name, record in records.items()}
    {'arrays': [1.5, 2.0], 'arrays-half-difference': [-0.5, 1.0]}
    """
    means, differences = {}, {}
    for name, first in after_first.items():
        second = after_second[name]
        if first.dtype.kind in "fc":
            with np.errstate(invalid="ignore"):  # a mask of infinities
                mean, difference = (first + second) / 2, (first - second) / 2
        else:  # counters and the like: they are never compared
            mean, difference = first, np.zeros_like(first)
        means[name] = Array(np.asarray(mean, first.dtype))
        differences[name] = Array(np.asarray(difference, first.dtype))
    return {
        arrayrecord_key: ArrayRecord(means),
        HALF_DIFFERENCE.format(arrayrecord_key): ArrayRecord(differences),
    }
