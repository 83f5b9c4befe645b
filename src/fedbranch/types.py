"""Types that several rooms share, each in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["JSON", "Aggregate", "Array", "Vector", "Weighting"]

# An array of any Array API library, on any device. No static type says so, so functions check
# what they get at run time.
Array: TypeAlias = NDArray[np.floating]

# Parameters, buffers or an update as one row of float32 numbers on the host.
Vector: TypeAlias = NDArray[np.float32]

# A JSON object, as json.loads returns it; no static type describes its values.
JSON: TypeAlias = dict[str, Any]

# Maps updates (num_clients, dim) and weights (num_clients,) to one vector (dim,).
Aggregate: TypeAlias = Callable[[Array, Array], Array]

# "examples": a client counts by its number of examples; "equal": all clients count alike.
Weighting: TypeAlias = Literal["examples", "equal"]
