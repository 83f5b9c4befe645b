"""The recurrent GPU kernels, on the CPU by Triton's interpreter; conftest.py switches it on."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

pytest.importorskip("triton")
from fedbranch.sim.engines.stacked.kernels.recurrence import stacked_lstm
from fedbranch.sim.engines.stacked.operations import StackedOperations

NUM_MODELS, NUM_ROWS, LENGTH, NUM_UNITS = 2, 3, 4, 5


def layer_inputs(num_rows=NUM_ROWS, num_units=NUM_UNITS):
    torch.manual_seed(0)
    shapes = [
        (NUM_MODELS, LENGTH, num_rows, 4 * num_units),
        (NUM_MODELS, 4 * num_units, num_units),
        (NUM_MODELS, num_rows, num_units),
        (NUM_MODELS, num_rows, num_units),
    ]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def torchs_layer(from_input, weight, hidden, memory, is_backward):
    """Run one model's layer by torch, with the identity as its input weights."""
    inputs = from_input.flip(0) if is_backward else from_input
    eye = torch.eye(from_input.shape[-1])
    outputs, _, memory = torch.lstm(
        inputs, [hidden[None], memory[None]], [eye, weight], False, 1, 0.0, False, False, False
    )
    return outputs.flip(0) if is_backward else outputs, memory[0]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5), (40, 16)])  # within one block of numbers, and beyond
def test_a_layer_and_its_gradients_are_torchs(sizes, is_backward):
    inputs = layer_inputs(*sizes)

    ours = stacked_lstm(*inputs, is_backward)
    each = [torchs_layer(*(tensor[i] for tensor in inputs), is_backward) for i in range(NUM_MODELS)]
    theirs = [torch.stack(parts) for parts in zip(*each, strict=True)]

    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    directions = [torch.randn(tensor.shape) for tensor in ours]
    for found, expected in zip(
        torch.autograd.grad(ours, inputs, directions),
        torch.autograd.grad(theirs, inputs, directions),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class States(nn.Module):
    """All outputs of a recurrent module, in one vector for each model."""

    def __init__(self, **settings):
        super().__init__()
        self.recurrent = nn.LSTM(4, NUM_UNITS, **settings)

    def forward(self, x):
        outputs, (hidden, memory) = self.recurrent(x)
        if not self.recurrent.batch_first:
            outputs = outputs.transpose(0, 1)
        return torch.cat([part.flatten() for part in (outputs, hidden, memory)])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 2, "batch_first": True},
        {"num_layers": 2, "bidirectional": True},
        {"bias": False},
        {"proj_size": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch warns that its own way is slow
def test_a_stacked_lstm_takes_the_kernels_and_agrees_with_itself_without_them(settings):
    torch.manual_seed(0)
    model = States(**settings)
    params = {
        name: torch.stack([p.detach(), 1.1 * p.detach()]).requires_grad_()
        for name, p in model.named_parameters()
    }
    x = torch.randn(2, 3, 6, 4)
    model.recurrent.flatten_parameters = lambda: None

    def of_one(uses_kernels, params, x):
        with StackedOperations(has_kernels=lambda _: uses_kernels):
            return functional_call(model, params, (x,))

    results = []
    for uses_kernels in (False, True):
        outputs = vmap(partial(of_one, uses_kernels))(params, x)
        gradients = torch.autograd.grad(outputs.square().sum(), list(params.values()))
        results.append([outputs, *gradients])
    alone = functional_call(model, {name: p[1] for name, p in params.items()}, (x[1],))

    for plain, by_kernels in zip(*results, strict=True):
        torch.testing.assert_close(by_kernels, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0][0][1], alone, rtol=1e-4, atol=1e-5)
