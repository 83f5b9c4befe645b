"""Operations that vmap cannot do or does slowly, said in terms of ones that it does well.

A recurrent layer has no rule under vmap; written out as a loop over time it becomes batched
matrix products. On a GPU convolution and pooling go to :mod:`fedbranch.sim.engines.stacked.kernels.convolution`, and
LSTMs to :mod:`fedbranch.sim.engines.stacked.kernels.recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["StackedOperations"]

Extent: TypeAlias = int | list[int] | tuple[int, ...]


class StackedOperations(TorchFunctionMode):
    """Within this context the operations of this module replace torch's own.

    Parameters
    ----------
    is_mixed
        Compute products in bfloat16, as ``torch.autocast`` does, which does not reach
        inside vmap.
    """

    def __init__(self, *, is_mixed: bool = False) -> None:
        super().__init__()
        self._is_mixed = is_mixed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if self._is_mixed:
            kind = _KINDS.get(getattr(func, "__name__", ""))
            if kind is not None:
                args, named = _converted(list(args), kind), _converted(named, kind)
        return _REPLACEMENTS.get(func, func)(*args, **named)


# In which precision mixed precision computes, by the function's name; all others take what
# comes. Products are the slow ones, and sums of exponentials those that need the digits.
_KINDS: dict[str, torch.dtype] = {
    **dict.fromkeys(
        ["linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"],
        torch.bfloat16,
    ),
    **dict.fromkeys(["conv1d", "conv2d", "conv3d", "lstm", "gru", "einsum"], torch.bfloat16),
    **dict.fromkeys(["softmax", "log_softmax", "layer_norm", "batch_norm"], torch.float32),
    **dict.fromkeys(["cross_entropy", "nll_loss", "mse_loss"], torch.float32),
}


def _converted(value: Any, kind: torch.dtype) -> Any:
    """Bring floating tensors, also inside of lists, to another precision."""
    if isinstance(value, Tensor):
        return value.to(kind) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _converted(part, kind) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_converted(part, kind) for part in value)
    return value


def lstm(
    inputs: Tensor,
    initial: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what ``torch.lstm`` does, as a loop over time."""

    def cell(gates: Tensor, state: list[Tensor], projection: Tensor | None) -> list[Tensor]:
        forget_in, forget, new, out = gates.chunk(4, dim=-1)
        memory = forget.sigmoid() * state[1] + forget_in.sigmoid() * new.tanh()
        hidden = out.sigmoid() * memory.tanh()
        return [hidden if projection is None else hidden @ projection.mT, memory]

    outputs, (hidden, memory) = _recurrent(
        cell, inputs, initial, weights, has_biases, num_layers, dropout, train, bidirectional,
        batch_first, by_kernels=_lstm_by_kernels if _has_recurrence_kernels(inputs) else None,
    )  # fmt: skip
    return outputs, hidden, memory


def gru(
    inputs: Tensor,
    initial: Tensor,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Compute what ``torch.gru`` does, as a loop over time."""

    def cell(gates: tuple[Tensor, Tensor], state: list[Tensor], _: Tensor | None) -> list[Tensor]:
        from_input, from_hidden = (part.chunk(3, dim=-1) for part in gates)
        reset = (from_input[0] + from_hidden[0]).sigmoid()
        keep = (from_input[1] + from_hidden[1]).sigmoid()
        new = (from_input[2] + reset * from_hidden[2]).tanh()
        return [new + keep * (state[0] - new)]

    outputs, (hidden,) = _recurrent(
        cell, inputs, [initial], weights, has_biases, num_layers, dropout, train, bidirectional,
        batch_first, keeps_apart=True,
    )  # fmt: skip
    return outputs, hidden


def _recurrent(
    cell: Callable[..., list[Tensor]],
    inputs: Tensor,
    initial: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    keeps_apart: bool = False,
    by_kernels: Callable[[Tensor, Tensor, list[Tensor], bool], list[Tensor]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run cells over time, layer by layer, in one or both directions.

    Parameters
    ----------
    cell
        Maps gates, state and projection weights to the next state. The gates are the sum of
        what the input and the hidden state contribute, or both apart (``keeps_apart``).
    by_kernels
        Takes the place of the loop over cells without projection: maps what the inputs
        contribute, the weights of the hidden state, the initial state and whether time runs
        backwards to the hidden states of all steps and what else the last state has.
    """
    if isinstance(weights, Tensor) or isinstance(initial, Tensor):
        raise RuntimeError("packed sequences have no stacked form")
    if dropout and train:
        raise RuntimeError("dropout between recurrent layers has no stacked form")
    layer_input = inputs.transpose(0, 1) if batch_first else inputs
    num_directions = 2 if bidirectional else 1
    per_direction = len(weights) // (num_layers * num_directions)
    is_projected = per_direction > (4 if has_biases else 2)
    ends: list[list[Tensor]] = []
    for layer in range(num_layers):
        sides = []
        for direction in range(num_directions):
            number = layer * num_directions + direction
            own = list(weights[number * per_direction : (number + 1) * per_direction])
            projection = own.pop() if is_projected else None
            from_input = layer_input @ own[0].mT
            if has_biases:
                from_input = from_input + (own[2] if keeps_apart else own[2] + own[3])
            state = [start[number] for start in initial]
            if by_kernels is not None and not is_projected:
                hidden, *rest = by_kernels(from_input, own[1], state, direction == 1)
                ends.append([hidden[0 if direction == 1 else -1], *rest])
                sides.append(hidden)
                continue
            steps = []
            at_steps = from_input.unbind()
            for at_step in at_steps if direction == 0 else reversed(at_steps):
                from_hidden = state[0] @ own[1].mT
                if keeps_apart and has_biases:
                    from_hidden = from_hidden + own[3]
                gates = (at_step, from_hidden) if keeps_apart else at_step + from_hidden
                state = cell(gates, state, projection)
                steps.append(state[0])
            sides.append(torch.stack(steps if direction == 0 else steps[::-1]))
            ends.append(state)
        layer_input = torch.cat(sides, dim=-1) if bidirectional else sides[0]
    outputs = layer_input.transpose(0, 1) if batch_first else layer_input
    return outputs, [torch.stack(parts) for parts in zip(*ends, strict=True)]


def _lstm_by_kernels(
    from_input: Tensor, weight: Tensor, state: list[Tensor], is_backward: bool
) -> list[Tensor]:
    return list(_VmapLSTM.apply(from_input, weight, *state, is_backward))  # type: ignore[no-untyped-call]  # torch's annotation is missing


def embedding(
    input: Tensor,  # noqa: A002  # torch's name for it
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute what ``embedding`` does; vmap would look for the padding in one client only."""
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
    """Compute what ``linear`` does, so that the weights' gradient lies as the weights do.

    With the factors the other way round it would come out transposed, and adding it to the
    weights would take longer than all the rest.
    """
    if input.ndim < 2:
        return functional.linear(input, weight, bias)
    columns = input.reshape(-1, input.shape[-1]).mT
    product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return product.mT.reshape(*input.shape[:-1], weight.shape[0])


def conv2d(
    input: Tensor,  # noqa: A002  # torch's name for it
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent | str = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Tensor:
    """Compute what ``torch.conv2d`` does, on a GPU as products over all clients."""
    if isinstance(padding, str) or groups != 1 or not _has_kernels(input) or input.ndim != 4:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    rows, columns = weight.shape[2:]
    window = ((rows, columns), _pair(stride), _pair(padding), _pair(dilation))
    result: Tensor = _VmapConvolution.apply(input, weight, bias, window)  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return result


def max_pool2d(
    input: Tensor,  # noqa: A002  # torch's name for it
    kernel_size: Extent,
    stride: Extent | None = None,
    padding: Extent = 0,
    dilation: Extent = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Compute what ``max_pool2d`` does; on a GPU without moving the images first."""
    size = _pair(kernel_size)
    is_simple = (stride is None or _pair(stride) == size) and _pair(padding) == (0, 0)
    is_simple = is_simple and _pair(dilation) == (1, 1) and not (ceil_mode or return_indices)
    if not is_simple or not _has_kernels(input) or input.ndim != 4:
        pool: Any = functional.max_pool2d  # whose result depends on the last argument
        return pool(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    pooled: Tensor = _VmapMaxPool.apply(input, size)  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return pooled


class _VmapConvolution(torch.autograd.Function):
    """Where vmap hands the images and kernels of all clients over."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, window: Any) -> Tensor:
        return _VmapConvolution._of_all(
            x[None], weight[None], None if bias is None else bias[None], window
        )[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # the gradient belongs to the operation on all clients

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Tensor, int]:
        x, weight, bias = (
            _stacked_first(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs[:3], in_dims[:3], strict=True)
        )
        return _VmapConvolution._of_all(x, weight, bias, inputs[3]), 0

    @staticmethod
    def _of_all(x: Tensor, weight: Tensor, bias: Tensor | None, window: Any) -> Tensor:
        from fedbranch.sim.engines.stacked.kernels.convolution import Window, stacked_conv2d

        return stacked_conv2d(x, weight, bias, Window(*window))


class _VmapMaxPool(torch.autograd.Function):
    """Where vmap hands the images of all clients over."""

    @staticmethod
    def forward(x: Tensor, size: tuple[int, int]) -> Tensor:
        return _VmapMaxPool._of_all(x[None], size)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # the gradient belongs to the operation on all clients

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], x: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, int]:
        return _VmapMaxPool._of_all(_stacked_first(x, in_dims[0], info.batch_size), size), 0

    @staticmethod
    def _of_all(x: Tensor, size: tuple[int, int]) -> Tensor:
        from fedbranch.sim.engines.stacked.kernels.convolution import stacked_max_pool2d

        return stacked_max_pool2d(x, size)


class _VmapLSTM(torch.autograd.Function):
    """Where vmap hands the layers of all clients over."""

    @staticmethod
    def forward(
        from_input: Tensor, weight: Tensor, hidden: Tensor, memory: Tensor, is_backward: bool
    ) -> tuple[Tensor, ...]:
        one = (tensor[None] for tensor in (from_input, weight, hidden, memory))
        return tuple(tensor[0] for tensor in _VmapLSTM._of_all(*one, is_backward))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass  # the gradient belongs to the operation on all clients

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], int]:
        tensors = (
            _stacked_first(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs[:4], in_dims[:4], strict=True)
        )
        return _VmapLSTM._of_all(*tensors, inputs[4]), 0

    @staticmethod
    def _of_all(*inputs: Any) -> tuple[Tensor, ...]:
        from fedbranch.sim.engines.stacked.kernels.recurrence import stacked_lstm

        return stacked_lstm(*inputs)


def _stacked_first(tensor: Any, dim: int | None, num_clients: int) -> Any:
    if tensor is None:
        return None
    if dim is None:
        return tensor.expand(num_clients, *tensor.shape)
    return tensor.movedim(dim, 0)


def _pair(value: Extent) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return first, rest[0] if rest else first


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.is_floating_point() and _has_triton()


def _has_recurrence_kernels(tensor: Tensor) -> bool:
    return _has_kernels(tensor) and tensor.dtype != torch.float64


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: lstm,
    torch.gru: gru,
    functional.embedding: embedding,
    functional.linear: linear,
    torch.conv2d: conv2d,
    functional.max_pool2d: max_pool2d,
}
