"""The GPU kernels for images, on the CPU by Triton's interpreter; conftest.py switches it on."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

pytest.importorskip("triton")
from fedbranch.sim.engines.stacked.kernels.convolution import (
    Window,
    stacked_conv2d,
    stacked_max_pool2d,
)
from fedbranch.sim.engines.stacked.operations import StackedOperations

NUM_MODELS, NUM_IMAGES = 2, 3
WINDOWS = {
    "3 x 3, padded": (Window((3, 3), (1, 1), (1, 1), (1, 1)), 3),
    "uneven, strided, dilated": (Window((3, 2), (2, 1), (1, 0), (2, 1)), 2),
    "5 x 5 over grey images": (Window((5, 5), (1, 1), (2, 2), (1, 1)), 1),
}


def images(channels, is_convolved):
    torch.manual_seed(0)
    x = torch.randn(NUM_MODELS, NUM_IMAGES, channels, 9, 8)
    if is_convolved:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.requires_grad_()


@pytest.mark.parametrize("is_convolved", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_convolution_and_its_gradients_are_torchs(window, has_bias, is_convolved):
    moves, channels = WINDOWS[window]
    x = images(channels, is_convolved)
    weight = torch.randn(NUM_MODELS, 4, channels, *moves.size, requires_grad=True)
    bias = torch.randn(NUM_MODELS, 4, requires_grad=True) if has_bias else None

    ours = stacked_conv2d(x, weight, bias, moves)
    theirs = torch.stack(
        [
            functional.conv2d(
                x[i], weight[i], None if bias is None else bias[i],
                moves.stride, moves.padding, moves.dilation,
            )
            for i in range(NUM_MODELS)
        ]
    )  # fmt: skip

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    wanted = [tensor for tensor in (x, weight, bias) if tensor is not None]
    direction = torch.randn(ours.shape)
    for found, expected in zip(
        torch.autograd.grad(ours, wanted, direction),
        torch.autograd.grad(theirs, wanted, direction),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_a_long_sum_over_places_is_cut_into_parts_and_whole_again():
    torch.manual_seed(0)
    x = torch.randn(1, 20, 2, 16, 16)
    weight = torch.randn(1, 70, 2, 3, 3, requires_grad=True)  # two tiles of channels
    window = Window((3, 3), (1, 1), (1, 1), (1, 1))
    direction = torch.randn(1, 20, 70, 16, 16)

    (ours,) = torch.autograd.grad(stacked_conv2d(x, weight, None, window), weight, direction)
    expected = functional.conv2d(x[0], weight[0], padding=1)
    (theirs,) = torch.autograd.grad(expected, weight, direction[0])

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("is_convolved", [False, True])
@pytest.mark.parametrize("size", [(2, 2), (3, 2)])
def test_pooling_and_its_gradient_are_torchs_to_the_bit(size, is_convolved):
    x = images(4, is_convolved)
    with torch.no_grad():
        x[0, 0, 0] = 0.0  # ties: the first pixel wins

    ours = stacked_max_pool2d(x, size)
    theirs = functional.max_pool2d(x.flatten(0, 1), size).unflatten(0, x.shape[:2])

    assert torch.equal(ours, theirs)
    direction = torch.randn(ours.shape)
    (found,) = torch.autograd.grad(ours, x, direction)
    (expected,) = torch.autograd.grad(theirs, x, direction)
    assert torch.equal(found, expected)


def test_a_stacked_network_takes_the_kernels_and_agrees_with_itself_without_them():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    )
    params = {
        name: torch.stack([p.detach(), 1.1 * p.detach()]).requires_grad_()
        for name, p in model.named_parameters()
    }
    x = torch.randn(2, 5, 1, 8, 8)

    def of_one(uses_kernels, params, x):
        with StackedOperations(has_kernels=lambda _: uses_kernels):
            return functional_call(model, params, (x,))

    results = []
    for uses_kernels in (False, True):
        outputs = vmap(partial(of_one, uses_kernels))(params, x)
        gradients = torch.autograd.grad(outputs.square().sum(), list(params.values()))
        results.append([outputs, *gradients])

    for plain, by_kernels in zip(*results, strict=True):
        torch.testing.assert_close(by_kernels, plain, rtol=1e-4, atol=1e-4)
