"""How a client trains: optimiser, loss, metrics, epochs or steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, get_args

import torch
from torch import Tensor, nn

from fedbranch.training.model_state import trainable
from fedbranch.training.precision import Precision

__all__ = [
    "LocalTraining",
    "Measure",
    "OptimizerFactory",
    "accuracy",
    "adam",
    "cross_entropy",
    "sgd",
]

# Makes an optimiser for a model's trainable parameters.
OptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

# Maps outputs and targets, both with one row for each example, to a mean over the examples.
Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of examples with the largest output at the target."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of a classifier's outputs, one column for each class."""
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise ValueError(
            f"the model's outputs have shape {tuple(outputs.shape)}; a classifier has one column "
            "for each class. For a regression pass LocalTraining(loss=torch.nn.functional.mse_loss)"
        )
    return nn.functional.cross_entropy(outputs, targets)


def sgd(
    learning_rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0
) -> OptimizerFactory:
    """Make a factory for stochastic gradient descent."""
    return lambda params: torch.optim.SGD(
        params, lr=learning_rate, momentum=momentum, weight_decay=weight_decay
    )


def adam(learning_rate: float, *, weight_decay: float = 0.0) -> OptimizerFactory:
    """Make a factory for Adam."""
    return lambda params: torch.optim.Adam(params, lr=learning_rate, weight_decay=weight_decay)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains: the paper's SGD_n.

    Parameters
    ----------
    optimizer
        Makes a fresh optimiser for the model's parameters in every round.
    epochs, steps
        Number of passes over the client's data, or of mini-batches. Exactly one of them.
    batch_size
        Examples per mini-batch. The last mini-batch of a pass may be smaller. A single
        example that is left over joins the mini-batch before it, because BatchNorm cannot
        train on one example.
    loss
        Maps outputs and targets to the mean loss; by default the cross-entropy.
    metrics
        Further measures for evaluation, by name; by default the accuracy if the loss is
        the cross-entropy.
    send_gradient
        Send a signal to compare beside the update: the negative gradient of the mean loss
        over all examples.
    precision
        Precision of products. ``"float32"``: full. ``"tf32"``: NVIDIA GPUs may round the
        factors to 11 bits; elsewhere full. ``"bf16"``: automatic mixed precision in
        bfloat16.

    Examples
    --------
    >>> LocalTraining(optimizer=torch.optim.Adam, epochs=1).batch_size
    20
    """

    optimizer: OptimizerFactory = field(default_factory=lambda: sgd(0.1))
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 20
    loss: Measure = cross_entropy
    metrics: Mapping[str, Measure] | None = None
    send_gradient: bool = False
    precision: Precision = "tf32"

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs is {self.epochs} and steps {self.steps}; give exactly one of them"
            )
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if "loss" in (self.metrics or {}):
            raise ValueError("metrics has a 'loss'; that name is taken by the loss itself")
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision is {self.precision!r}; it must be one of {get_args(Precision)}"
            )

    @property
    def on_a_half(self) -> LocalTraining:
        """The same training on half of the data: twice the epochs, or the same steps."""
        return self if self.epochs is None else replace(self, epochs=2 * self.epochs)

    @property
    def measures(self) -> dict[str, Measure]:
        """The loss and all metrics, by name."""
        metrics = self.metrics
        if metrics is None:
            is_classifier = self.loss in (cross_entropy, nn.functional.cross_entropy)
            metrics = {"accuracy": accuracy} if is_classifier else {}
        return {"loss": self.loss, **metrics}

    def batches_per_pass(self, num_rows: int) -> int:
        """Count the mini-batches of one pass over ``num_rows`` examples."""
        whole, left_over = divmod(num_rows, self.batch_size)
        joins_the_last = left_over == 1 < self.batch_size and whole > 0
        return whole + (left_over > 0 and not joins_the_last)

    def num_steps(self, num_rows: int) -> int:
        """Count the mini-batches that a client with ``num_rows`` examples trains on."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * self.batches_per_pass(num_rows)

    def num_visits(self, num_rows: int) -> int:
        """Count the visits to examples in all mini-batches of :meth:`num_steps`."""
        passes, steps = divmod(self.num_steps(num_rows), self.batches_per_pass(num_rows))
        return passes * num_rows + steps * self.batch_size

    def describe(self, model: nn.Module) -> dict[str, str]:
        """Describe all that the result depends on, to recognise the same training later."""
        optimizer = self.optimizer(list(trainable(model)))
        groups = [
            {name: repr(value) for name, value in sorted(group.items()) if name != "params"}
            for group in optimizer.param_groups
        ]
        return {
            "optimizer": f"{type(optimizer).__name__} {groups}",
            "duration": f"{self.epochs} epochs, {self.steps} steps",
            "batch_size": str(self.batch_size),
            "measures": ", ".join(
                f"{name}: {getattr(measure, '__qualname__', type(measure).__qualname__)}"
                for name, measure in self.measures.items()
            ),
            "send_gradient": str(self.send_gradient),
            "precision": self.precision,
        }
