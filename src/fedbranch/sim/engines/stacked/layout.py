"""Layouts of a model that compute the same in less time: order of layers, order in memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedbranch.training.hashed_random import SeededDropout
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import trainable

__all__ = ["cpu_layout", "pool_before_relu"]


def pool_before_relu(model: nn.Module) -> nn.Module:
    """Move max-pooling before a relu that it follows, in place; return the same model.

    The two commute, also in their gradients: either way, a window's largest number is kept if
    it is positive. After pooling, relu has fewer numbers to compute.
    """
    for module in model.modules():
        if type(module) is not nn.Sequential:
            continue
        for i in range(len(module) - 1):
            first, second = module[i], module[i + 1]
            is_pooling = type(second) is nn.MaxPool2d and not second.return_indices
            if type(first) is nn.ReLU and is_pooling:
                module[i], module[i + 1] = second, first
    return model


def cpu_layout(model: nn.Module, training: LocalTraining, x: Tensor, y: Tensor) -> nn.Module:
    """Copy a model, with channels last if it has convolutions and computes the same.

    On one core, convolutions and pooling together are a quarter faster with channels last.

    Parameters
    ----------
    model
        Any module. Some models refuse another order of their numbers, for example because
        they use ``view``. They are copied in their own order.
    training
        Its loss.
    x, y
        Some examples, to try the copy on.
    """
    plain = copy.deepcopy(model)
    if not any(param.ndim == 4 for param in model.parameters()):
        return plain
    candidate = pool_before_relu(copy.deepcopy(model))
    candidate = candidate.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it
    try:
        is_same = all(
            torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
            for ours, theirs in zip(
                _loss_and_gradients(candidate, training, x, y),
                _loss_and_gradients(plain, training, x, y),
                strict=True,
            )
        )
    except Exception:
        return plain  # if the model itself is wrong, the first client's training reports it
    return candidate if is_same else plain


def _loss_and_gradients(
    model: nn.Module, training: LocalTraining, x: Tensor, y: Tensor
) -> list[Tensor]:
    found: list[Tensor] = []
    for is_training in (True, False):
        tried = copy.deepcopy(model).train(is_training)
        with torch.random.fork_rng(devices=[]), SeededDropout(torch.tensor(1), 0):
            torch.manual_seed(0)
            loss = training.loss(tried(x.clone()), y)
        gradients = torch.autograd.grad(loss, list(trainable(tried)), allow_unused=True)
        found += [loss, *(gradient for gradient in gradients if gradient is not None)]
    return found
