"""Convolution and pooling of many models, on a GPU by kernels.

The kernels are in :mod:`fedbranch.sim.engines.stacked.kernels.convolution`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fedbranch.sim.engines.stacked.kernel_inputs import models_first

__all__ = ["conv2d", "max_pool2d"]

Size: TypeAlias = int | list[int] | tuple[int, ...]  # one for both dimensions, or rows and columns


def conv2d(
    input: Tensor,  # noqa: A002  # torch's name for it
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    has_kernels: Callable[[Tensor], bool],
) -> Tensor:
    """Compute what ``torch.conv2d`` does; by a kernel as batched products over all models.

    Parameters
    ----------
    input, weight, bias, stride, padding, dilation, groups
        As torch passes them.
    has_kernels
        Returns whether the kernels can compute with a tensor.
    """
    if isinstance(padding, str) or groups != 1 or not has_kernels(input) or input.ndim != 4:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    rows, columns = weight.shape[2:]
    window = ((rows, columns), _pair(stride), _pair(padding), _pair(dilation))
    result: Tensor = _VmapConvolution.apply(input, weight, bias, window)  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return result


def max_pool2d(
    input: Tensor,  # noqa: A002  # torch's name for it
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    has_kernels: Callable[[Tensor], bool],
) -> Any:
    """Compute what ``max_pool2d`` does; by a kernel without moving the images first.

    Parameters
    ----------
    input, kernel_size, stride, padding, dilation, ceil_mode, return_indices
        As torch passes them.
    has_kernels
        Returns whether the kernels can compute with a tensor.
    """
    size = _pair(kernel_size)
    is_simple = (stride is None or _pair(stride) == size) and _pair(padding) == (0, 0)
    is_simple = is_simple and _pair(dilation) == (1, 1) and not (ceil_mode or return_indices)
    if not is_simple or not has_kernels(input) or input.ndim != 4:
        pool: Any = functional.max_pool2d  # its result's type depends on the last argument
        return pool(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    pooled: Tensor = _VmapMaxPool.apply(input, size)  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return pooled


class _VmapConvolution(torch.autograd.Function):
    """Receives the images and kernels of all models from vmap."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, window: Any) -> Tensor:
        return _VmapConvolution._of_all(
            x[None], weight[None], None if bias is None else bias[None], window
        )[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # the gradient belongs to the operation on all models

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Tensor, int]:
        x, weight, bias = (
            models_first(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs[:3], in_dims[:3], strict=True)
        )
        return _VmapConvolution._of_all(x, weight, bias, inputs[3]), 0

    @staticmethod
    def _of_all(x: Tensor, weight: Tensor, bias: Tensor | None, window: Any) -> Tensor:
        from fedbranch.sim.engines.stacked.kernels.convolution import Window, stacked_conv2d

        return stacked_conv2d(x, weight, bias, Window(*window))


class _VmapMaxPool(torch.autograd.Function):
    """Receives the images of all models from vmap."""

    @staticmethod
    def forward(x: Tensor, size: tuple[int, int]) -> Tensor:
        return _VmapMaxPool._of_all(x[None], size)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # the gradient belongs to the operation on all models

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], x: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, int]:
        return _VmapMaxPool._of_all(models_first(x, in_dims[0], info.batch_size), size), 0

    @staticmethod
    def _of_all(x: Tensor, size: tuple[int, int]) -> Tensor:
        from fedbranch.sim.engines.stacked.kernels.convolution import stacked_max_pool2d

        return stacked_max_pool2d(x, size)


def _pair(value: Size) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return first, rest[0] if rest else first
