"""Tensors that the GPU kernels compute with, and how they get them from ``vmap``."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

__all__ = ["has_kernels", "models_first"]


def has_kernels(tensor: Tensor) -> bool:
    """Return whether the kernels can compute with a tensor: on a GPU, floating, with Triton."""
    return tensor.is_cuda and tensor.is_floating_point() and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def models_first(tensor: Any, dim: int | None, num_models: int) -> Any:
    """Return a tensor of all models with the models as the first dimension.

    Parameters
    ----------
    tensor
        A tensor, or None, which is returned.
    dim
        The dimension of the models; None if all models share the tensor.
    num_models
        Number of models.
    """
    if tensor is None:
        return None
    if dim is None:
        return tensor.expand(num_models, *tensor.shape)
    return tensor.movedim(dim, 0)
