"""The recurrence of many LSTMs at once, for NVIDIA GPUs, in Triton.

A cell is a product and a dozen small operations on its result. Under vmap each operation, and
each derivative, is a kernel of its own, and launching them takes longer than the work. Here a
cell is the product and one kernel, and so is its derivative. The weights' gradient is one
product over all steps.
"""

# ruff: noqa: N803  # Triton's constants are written so

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["stacked_lstm"]

BLOCK = 512  # numbers per program


def stacked_lstm(
    from_input: Tensor, weight: Tensor, hidden: Tensor, memory: Tensor, is_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Run one layer of every model's LSTM over time.

    Parameters
    ----------
    from_input
        Shape (num_models, length, num_rows, 4 * num_units): the contribution of the inputs
        and all biases to the gates, in torch's order.
    weight
        Shape (num_models, 4 * num_units, num_units): from the hidden state to the gates.
    hidden, memory
        Shape (num_models, num_rows, num_units): the state before the first step.
    is_backward
        Run from the last step to the first.

    Returns
    -------
    tuple
        The hidden state of every step, (num_models, length, num_rows, num_units), and the
        memory after the last step.
    """
    result: tuple[Tensor, Tensor] = _Recurrence.apply(
        from_input, weight, hidden, memory, is_backward
    )  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return result


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, from_input: Tensor, weight: Tensor, hidden: Tensor, memory: Tensor, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        from_input, hidden, memory = (t.contiguous() for t in (from_input, hidden, memory))
        num_models, length, num_rows, num_units = (*from_input.shape[:3], weight.shape[2])
        gates = torch.empty_like(from_input)
        hiddens = from_input.new_empty(num_models, length, num_rows, num_units)
        memories = torch.empty_like(hiddens)
        before, memory_before = hidden, memory
        for step in _order(length, reverse):
            from_hidden = torch.bmm(before, weight.mT)
            now, memory_now = hiddens[:, step], memories[:, step]
            _cell[_grid(now)](
                from_input[:, step], from_hidden, memory_before, gates[:, step], now, memory_now,
                from_input.stride(0), from_hidden.stride(0), memory_before.stride(0),
                hiddens.stride(0), num_rows * num_units, num_units, BLOCK,
            )  # fmt: skip
            before, memory_before = now, memory_now
        ctx.save_for_backward(weight, hidden, memory, gates, hiddens, memories)
        ctx.reverse = reverse
        return hiddens, memory_before.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, hidden, memory, gates, hiddens, memories = ctx.saved_tensors
        by_output = gradients[0].contiguous()
        by_memory = gradients[1].clone(memory_format=torch.contiguous_format)
        num_models, length, num_rows, num_units = hiddens.shape
        by_gates = torch.empty_like(gates)
        by_hidden = torch.zeros_like(by_memory)
        steps = _order(length, ctx.reverse)
        for number in reversed(range(length)):
            step = steps[number]
            memory_before = memories[:, steps[number - 1]] if number > 0 else memory
            _cell_gradient[_grid(by_memory)](
                by_output[:, step], by_hidden, by_memory, gates[:, step], memory_before,
                memories[:, step], by_gates[:, step],
                by_output.stride(0), by_hidden.stride(0), gates.stride(0),
                memory_before.stride(0), num_rows * num_units, num_units, BLOCK,
            )  # fmt: skip
            by_hidden = torch.bmm(by_gates[:, step], weight)
        first = hidden[:, None]
        if ctx.reverse:
            befores = torch.cat([hiddens[:, 1:], first], dim=1)
        else:
            befores = torch.cat([first, hiddens[:, :-1]], dim=1)
        by_weight = torch.bmm(
            by_gates.view(num_models, length * num_rows, 4 * num_units).mT,
            befores.view(num_models, length * num_rows, num_units),
        )
        return by_gates, by_weight, by_hidden, by_memory, None


def _order(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def _grid(state: Tensor) -> tuple[int, int]:
    num_models, num_rows, num_units = state.shape
    return triton.cdiv(num_rows * num_units, BLOCK), num_models


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]  # Triton's own language
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _cell(  # type: ignore[no-untyped-def]  # Triton's own language
    from_input, from_hidden, memory_before, gates, hidden, memory,
    input_stride, product_stride, before_stride, state_stride, size,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gates, the memory and the hidden state; strides are those of the models."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    model = tl.program_id(1).to(tl.int64)
    is_inside = place < size
    # A row has the numbers of four gates, one gate after the other; the state has one number.
    gate = place + 3 * UNITS * (place // UNITS)
    inputs = from_input + model * input_stride + gate
    products = from_hidden + model * product_stride + gate
    enter = tl.sigmoid(
        tl.load(inputs, is_inside).to(tl.float32) + tl.load(products, is_inside).to(tl.float32)
    )
    forget = tl.sigmoid(
        tl.load(inputs + UNITS, is_inside).to(tl.float32)
        + tl.load(products + UNITS, is_inside).to(tl.float32)
    )
    new = _tanh(
        tl.load(inputs + 2 * UNITS, is_inside).to(tl.float32)
        + tl.load(products + 2 * UNITS, is_inside).to(tl.float32)
    )
    out = tl.sigmoid(
        tl.load(inputs + 3 * UNITS, is_inside).to(tl.float32)
        + tl.load(products + 3 * UNITS, is_inside).to(tl.float32)
    )
    kept = tl.load(memory_before + model * before_stride + place, is_inside).to(tl.float32)
    now = forget * kept + enter * new
    results = gates + model * input_stride + gate
    tl.store(results, enter, is_inside)
    tl.store(results + UNITS, forget, is_inside)
    tl.store(results + 2 * UNITS, new, is_inside)
    tl.store(results + 3 * UNITS, out, is_inside)
    tl.store(memory + model * state_stride + place, now, is_inside)
    tl.store(hidden + model * state_stride + place, out * _tanh(now), is_inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _cell_gradient(  # type: ignore[no-untyped-def]  # Triton's own language
    by_output, by_hidden, by_memory, gates, memory_before, memory, by_gates,
    output_stride, state_stride, gates_stride, before_stride, size,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the derivatives by the gates' inputs and, in place, by the memory before."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    model = tl.program_id(1).to(tl.int64)
    is_inside = place < size
    gate = place + 3 * UNITS * (place // UNITS)
    values = gates + model * gates_stride + gate
    enter = tl.load(values, is_inside).to(tl.float32)
    forget = tl.load(values + UNITS, is_inside).to(tl.float32)
    new = tl.load(values + 2 * UNITS, is_inside).to(tl.float32)
    out = tl.load(values + 3 * UNITS, is_inside).to(tl.float32)
    kept = tl.load(memory_before + model * before_stride + place, is_inside).to(tl.float32)
    now = _tanh(tl.load(memory + model * output_stride + place, is_inside).to(tl.float32))
    hidden = tl.load(by_output + model * output_stride + place, is_inside).to(tl.float32)
    hidden += tl.load(by_hidden + model * state_stride + place, is_inside).to(tl.float32)
    total = tl.load(by_memory + model * state_stride + place, is_inside).to(tl.float32)
    total += hidden * out * (1 - now * now)
    results = by_gates + model * gates_stride + gate
    tl.store(results, total * new * enter * (1 - enter), is_inside)
    tl.store(results + UNITS, total * kept * forget * (1 - forget), is_inside)
    tl.store(results + 2 * UNITS, total * enter * (1 - new * new), is_inside)
    tl.store(results + 3 * UNITS, hidden * now * out * (1 - out), is_inside)
    tl.store(by_memory + model * state_stride + place, total * forget, is_inside)
