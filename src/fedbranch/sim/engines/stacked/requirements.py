"""What can be stacked: which optimisers, losses and metrics, and which examples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbranch.data import ClientData
from fedbranch.training.local_training import LocalTraining, Measure, accuracy, cross_entropy
from fedbranch.training.model_state import trainable

__all__ = [
    "CannotStack",
    "check_optimizer",
    "check_precision",
    "check_shapes",
    "has_ignored_targets",
    "is_mean_over_examples",
]

# Optimisers that treat every number by itself. So a step on stacked parameters is a step on
# each model's own parameters.
ELEMENTWISE_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# Measures that are the plain mean of their values for single examples.
MEANS_OVER_EXAMPLES = (
    cross_entropy,
    accuracy,
    functional.cross_entropy,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
# Losses of which this is true as long as they have no weights.
LOSSES_OVER_EXAMPLES = (
    nn.CrossEntropyLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)
# Torch's cross-entropy leaves examples with this target out of the mean. Then it is no plain
# mean over examples.
IGNORED_TARGET = -100


class CannotStack(Exception):
    """A model, its training or the data do not allow a stack; the message says why."""


def is_mean_over_examples(measure: Measure) -> bool:
    """Return whether a measure is known to be the plain mean of its values for single examples."""
    if measure in MEANS_OVER_EXAMPLES:
        return True
    return (
        type(measure) in LOSSES_OVER_EXAMPLES
        and getattr(measure, "reduction", None) == "mean"
        and all(getattr(measure, name, None) is None for name in ("weight", "pos_weight"))
        and getattr(measure, "ignore_index", IGNORED_TARGET) == IGNORED_TARGET
    )


def has_ignored_targets(clients: Mapping[str, ClientData]) -> bool:
    """Return whether any client has a target that torch's cross-entropy ignores."""
    return any(
        np.issubdtype(part.y.dtype, np.integer) and bool((part.y == IGNORED_TARGET).any())
        for client in clients.values()
        for part in (client.train, client.test, client.validation)
        if part is not None
    )


def check_precision(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Refuse complex numbers, and parameters of several types.

    Raises
    ------
    CannotStack
        With the types.
    """
    kinds = {str(param.dtype) for param in params.values()}
    if len(kinds) > 1 or any(t.is_complex() for t in [*params.values(), *buffers.values()]):
        raise CannotStack(f"its parameters are of several or complex kinds: {sorted(kinds)}")


def check_optimizer(training: LocalTraining, model: nn.Module) -> None:
    """Refuse optimisers for which a step on stacked parameters is no step on each model's own.

    Raises
    ------
    CannotStack
        With the reason.
    """
    params = list(trainable(model))
    optimizer = training.optimizer(params)
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        raise CannotStack(f"{type(optimizer).__name__} may look at several numbers at once")
    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    if has_hooks or "step" in vars(optimizer):
        raise CannotStack("its optimiser's steps are changed from outside")
    if len(optimizer.param_groups) > 1 or len(grouped) != len(params):
        raise CannotStack("its optimiser treats parameters differently")


def check_shapes(clients: Mapping[str, ClientData]) -> None:
    """Refuse clients with examples of different shapes or types.

    Raises
    ------
    CannotStack
        With the part of the data in which they differ.
    """
    for part in ("train", "test", "validation", "held_out"):
        kinds = {
            tuple((array.dtype.str, array.shape[1:]) for array in examples)
            for client in clients.values()
            if (examples := getattr(client, part)) is not None
        }
        if len(kinds) > 1:
            raise CannotStack(f"the clients' {part} examples differ in shape or type")
