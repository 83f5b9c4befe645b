"""Recurrent layers of many models.

They have no rule under ``vmap``. As a loop over time they become batched matrix products; on a
GPU a kernel computes a whole LSTM layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbranch.sim.engines.stacked.kernel_inputs import models_first

__all__ = ["gru", "lstm"]


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
    *,
    has_kernels: Callable[[Tensor], bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what ``torch.lstm`` does, by a kernel or as a loop over time.

    Parameters
    ----------
    inputs, initial, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first
        As torch passes them.
    has_kernels
        Returns whether the kernels can compute with a tensor.
    """
    can_use_kernel = has_kernels(inputs) and inputs.dtype != torch.float64

    def cell(gates: Tensor, state: list[Tensor], projection: Tensor | None) -> list[Tensor]:
        forget_in, forget, new, out = gates.chunk(4, dim=-1)
        memory = forget.sigmoid() * state[1] + forget_in.sigmoid() * new.tanh()
        hidden = out.sigmoid() * memory.tanh()
        return [hidden if projection is None else hidden @ projection.mT, memory]

    outputs, (hidden, memory) = _recurrent(
        cell, inputs, initial, weights, has_biases, num_layers, dropout, train, bidirectional,
        batch_first, layer_by_kernel=_lstm_by_kernel if can_use_kernel else None,
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
    layer_by_kernel: Callable[[Tensor, Tensor, list[Tensor], bool], list[Tensor]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run cells over time, layer by layer, in one or both directions.

    Parameters
    ----------
    cell
        Maps gates, state and projection weights to the next state. The gates are the sum of
        the contributions of the input and of the hidden state.
    keeps_apart
        Pass both contributions to the cell as a pair, without adding them.
    layer_by_kernel
        Replaces the loop over cells that have no projection. It maps the inputs'
        contribution, the weights of the hidden state, the initial state and whether time
        runs backwards, to the hidden states of all steps and the rest of the last state.
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
            if layer_by_kernel is not None and not is_projected:
                hidden, *rest = layer_by_kernel(from_input, own[1], state, direction == 1)
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


def _lstm_by_kernel(
    from_input: Tensor, weight: Tensor, state: list[Tensor], is_backward: bool
) -> list[Tensor]:
    return list(_VmapLSTM.apply(from_input, weight, *state, is_backward))  # type: ignore[no-untyped-call]  # torch's annotation is missing


class _VmapLSTM(torch.autograd.Function):
    """Receives the layers of all models from vmap."""

    @staticmethod
    def forward(
        from_input: Tensor, weight: Tensor, hidden: Tensor, memory: Tensor, is_backward: bool
    ) -> tuple[Tensor, ...]:
        one = (tensor[None] for tensor in (from_input, weight, hidden, memory))
        return tuple(tensor[0] for tensor in _VmapLSTM._of_all(*one, is_backward))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass  # the gradient belongs to the operation on all models

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], int]:
        tensors = (
            models_first(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs[:4], in_dims[:4], strict=True)
        )
        return _VmapLSTM._of_all(*tensors, inputs[4]), 0

    @staticmethod
    def _of_all(*inputs: Any) -> tuple[Tensor, ...]:
        from fedbranch.sim.engines.stacked.kernels.recurrence import stacked_lstm

        return stacked_lstm(*inputs)
