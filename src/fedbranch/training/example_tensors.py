"""A client's examples as tensors on the device and in the precision of its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import Examples

__all__ = ["example_tensors"]


def example_tensors(
    data: Examples | tuple[Tensor, Tensor], model: nn.Module
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on the model's device, floating ones in its precision.

    Tensors are returned unchanged, so that examples need to be converted only once.
    """
    param = next(model.parameters())
    precision = param.dtype if param.is_floating_point() else None

    def tensor(array: NDArray[Any] | Tensor) -> Tensor:
        if isinstance(array, Tensor):
            return array
        # Copied if it is read-only: torch warns that the array could be written to.
        own = array if array.flags.writeable else array.copy()
        dtype = precision if np.issubdtype(own.dtype, np.floating) else None
        return torch.as_tensor(own, device=param.device, dtype=dtype)

    x, y = data
    return tensor(x), tensor(y)
