"""A model arranged so that it computes the same in less time."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedbranch.training.hashed_random import SeededDropout
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import trainable

__all__ = ["arranged_for_cpu", "pooled_first"]


def pooled_first(model: nn.Module) -> nn.Module:
    """Let max-pooling go before a relu that it follows, in place.

    The two commute, also in their gradients: a block's largest number is kept if it is
    positive. After the pooling there is less to do.
    """
    for module in model.modules():
        if type(module) is not nn.Sequential:
            continue
        for place in range(len(module) - 1):
            first, second = module[place], module[place + 1]
            is_pooling = type(second) is nn.MaxPool2d and not second.return_indices
            if type(first) is nn.ReLU and is_pooling:
                module[place], module[place + 1] = second, first
    return model


def arranged_for_cpu(model: nn.Module, training: LocalTraining, x: Tensor, y: Tensor) -> nn.Module:
    """Give a copy of a model whose numbers lie as one core's kernels like them.

    Convolutions and pooling together are a quarter faster with the channels last.

    Parameters
    ----------
    model
        Any module. One that refuses another order of its numbers, for example because it
        looks at them with ``view``, is copied as it is.
    training
        Its loss.
    x, y
        Some examples, to try the copy on.
    """
    plain = copy.deepcopy(model)
    if not any(param.ndim == 4 for param in model.parameters()):
        return plain
    candidate = pooled_first(copy.deepcopy(model))
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
        return plain  # whatever is wrong will be said when the first client trains
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
