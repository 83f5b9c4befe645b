"""Operations that ``vmap`` cannot do, or does slowly, in terms of operations that it does well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedbranch.sim.engines.stacked.images import conv2d, max_pool2d
from fedbranch.sim.engines.stacked.kernel_inputs import has_kernels
from fedbranch.sim.engines.stacked.recurrent import gru, lstm

__all__ = ["StackedOperations", "embedding", "linear"]


class StackedOperations(TorchFunctionMode):
    """A context in which our operations replace torch's own.

    Parameters
    ----------
    is_mixed
        Compute products in bfloat16, as ``torch.autocast`` does. Autocast itself has no
        effect inside vmap.
    has_kernels
        Returns whether the GPU kernels can compute with a tensor.
    """

    def __init__(
        self, *, is_mixed: bool = False, has_kernels: Callable[[Tensor], bool] = has_kernels
    ) -> None:
        super().__init__()
        self._is_mixed = is_mixed
        self._has_kernels = has_kernels

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if self._is_mixed:
            kind = _MIXED_PRECISION.get(getattr(func, "__name__", ""))
            if kind is not None:
                args, named = _converted(list(args), kind), _converted(named, kind)
        if func in _WITH_KERNELS:
            return _WITH_KERNELS[func](*args, **named, has_kernels=self._has_kernels)
        return _REPLACEMENTS.get(func, func)(*args, **named)


def embedding(
    input: Tensor,  # noqa: A002  # torch's name for it
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute what ``embedding`` does; vmap would look for the padding in one model only."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise RuntimeError(
            f"an embedding with max_norm {max_norm}, scale_grad_by_freq {scale_grad_by_freq}, "
            f"sparse {sparse} (norm_type {norm_type}) has no stacked form"
        )
    vectors = functional.embedding(input, weight)
    if padding_idx is None:
        return vectors
    is_padding = (input == padding_idx % weight.shape[0])[..., None]
    return torch.where(is_padding, vectors.detach(), vectors)


def linear(
    input: Tensor,  # noqa: A002  # torch's name for it
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute what ``linear`` does, with the gradient in the memory order of the weights.

    With the factors the other way round the weights' gradient would come out transposed, and
    adding it to the weights would take longer than all other work.
    """
    if input.ndim < 2:
        return functional.linear(input, weight, bias)
    columns = input.reshape(-1, input.shape[-1]).mT
    product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return product.mT.reshape(*input.shape[:-1], weight.shape[0])


# The precision of mixed precision, by the function's name. Other functions compute in the
# precision of their inputs. Products are slow, so they are rounded; sums of exponentials need
# all digits.
_MIXED_PRECISION: dict[str, torch.dtype] = {
    **dict.fromkeys(
        ["linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"],
        torch.bfloat16,
    ),
    **dict.fromkeys(["conv1d", "conv2d", "conv3d", "lstm", "gru", "einsum"], torch.bfloat16),
    **dict.fromkeys(["softmax", "log_softmax", "layer_norm", "batch_norm"], torch.float32),
    **dict.fromkeys(["cross_entropy", "nll_loss", "mse_loss"], torch.float32),
}


def _converted(value: Any, kind: torch.dtype) -> Any:
    """Convert floating tensors, also inside lists and dicts, to another precision."""
    if isinstance(value, Tensor):
        return value.to(kind) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _converted(part, kind) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_converted(part, kind) for part in value)
    return value


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.gru: gru,
    functional.embedding: embedding,
    functional.linear: linear,
}
_WITH_KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: lstm,
    torch.conv2d: conv2d,
    functional.max_pool2d: max_pool2d,
}
