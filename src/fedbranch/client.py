"""One client in PyTorch: from parameters and data to an update.

Readable first: the simulator's faster paths must give the same results as these functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedbranch.data import Examples
from fedbranch.messages import Task, Update

__all__ = [
    "LocalTraining",
    "ModelState",
    "accuracy",
    "adam",
    "evaluate",
    "local_update",
    "sgd",
    "stream_seed",
]

OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# Outputs of the model and targets, both with one row for each example, to a mean over them.
Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor]

EVALUATION_BATCH_SIZE = 1024


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the share of rows whose largest output is at the target."""
    return (outputs.argmax(dim=1) == targets).float().mean()


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
        How long: passes over the client's data, or mini-batches. Exactly one of them.
    batch_size
        Examples per mini-batch. The last one of a pass may be smaller.
    loss
        Maps outputs and targets to the mean loss.
    metrics
        Further measures for evaluation, by name.
    send_gradient
        Send the negative full-batch gradient as the signal to compare, beside the update.

    Examples
    --------
    >>> LocalTraining(optimizer=torch.optim.Adam, epochs=1).batch_size
    20
    """

    optimizer: OptimizerFactory = field(default_factory=lambda: sgd(0.1))
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 20
    loss: Measure = nn.functional.cross_entropy
    metrics: Mapping[str, Measure] = field(
        default_factory=lambda: MappingProxyType({"accuracy": accuracy})
    )
    send_gradient: bool = False

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs is {self.epochs} and steps {self.steps}; give exactly one of them"
            )
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if "loss" in self.metrics:
            raise ValueError("metrics has a 'loss'; that name is taken by the loss itself")


@dataclass(frozen=True, eq=False)
class ModelState:
    """All numbers of a model that training changes, as two flat vectors.

    Attributes
    ----------
    params
        Shape (num_params,): the trainable parameters.
    buffers
        Shape (num_buffers,), float32: the buffers, such as BatchNorm statistics.
    """

    params: Tensor
    buffers: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Copy a model's state."""
        params = [p.detach().reshape(-1) for p in _trainable(model)]
        if not params:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        buffers = [b.detach().reshape(-1).float() for b in model.buffers()]
        return cls(
            torch.cat(params),
            torch.cat(buffers) if buffers else params[0].new_zeros(0, dtype=torch.float32),
        )

    def moved_by(self, params_step: Tensor, buffers_step: Tensor) -> ModelState:
        """Give the state that is displaced by these steps."""
        return ModelState(self.params + params_step, self.buffers + buffers_step)

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Overwrite a model's state with this one. Whole-number buffers are rounded."""
        start = 0
        for param in _trainable(model):
            values = self.params[start : start + param.numel()]
            param.copy_(values.view_as(param))
            start += param.numel()
        start = 0
        for buffer in model.buffers():
            values = self.buffers[start : start + buffer.numel()].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
            start += buffer.numel()


def local_update(
    model: nn.Module,
    initial: ModelState,
    task: Task,
    data: Examples,
    training: LocalTraining,
    *,
    seed: int,
) -> Update:
    """Do a client's work in a round: load the parameters, train, give the update.

    Parameters
    ----------
    model
        Where to train. Its own parameters are overwritten.
    initial
        The initial model θ0, from which the task's parameters are displacements.
    task
        What the server planned for this client.
    data
        The client's training examples.
    training
        How to train.
    seed
        For the order of the examples and for dropout; see :func:`stream_seed`.

    Returns
    -------
    Update
        After minus before, with the training loss of the examples as they were visited.
    """
    device = initial.params.device
    start = initial.moved_by(
        torch.tensor(task.params, device=device), torch.tensor(task.buffers, device=device)
    )
    start.load_into(model)
    x, y = _tensors(data, device)
    signal = -_gradient(model, x, y, training.loss) if training.send_gradient else None
    loss = _train(model, x, y, training, seed)
    end = ModelState.of(model)
    return Update(
        vector=(end.params - start.params).cpu().numpy(),
        num_examples=len(x),
        metrics={"loss": loss},
        buffers=(end.buffers - start.buffers).cpu().numpy(),
        base=task.base,
        signal=None if signal is None else signal.cpu().numpy(),
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: Examples, training: LocalTraining) -> dict[str, float]:
    """Measure a model on examples, in evaluation mode.

    Returns
    -------
    dict
        ``"loss"`` and every metric of ``training``, each a mean over the examples.
    """
    measures = {"loss": training.loss, **training.metrics}
    totals = dict.fromkeys(measures, 0.0)
    x, y = _tensors(data, next(model.parameters()).device)
    was_training = model.training
    model.eval()
    for inputs, targets in zip(
        torch.split(x, EVALUATION_BATCH_SIZE), torch.split(y, EVALUATION_BATCH_SIZE), strict=True
    ):
        outputs = model(inputs)
        for name, measure in measures.items():
            totals[name] += float(measure(outputs, targets)) * len(inputs)
    model.train(was_training)
    return {name: total / len(x) for name, total in totals.items()}


def stream_seed(seed: int, *where: int | str) -> int:
    """Derive an independent seed for one place of a run, such as (round, client id).

    Examples
    --------
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-07")
    True
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-08")
    False
    """
    name = "\x1f".join(str(part) for part in (seed, *where))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()[:8]) >> 1


def _train(model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining, seed: int) -> float:
    """Train in place; give the mean loss over all visited examples."""
    optimizer = training.optimizer(list(_trainable(model)))
    total_loss, num_visited = torch.zeros((), device=x.device), 0
    model.train()
    # Dropout knows no generator but the global one: lend it ours, give it back as it was.
    cuda_devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices):
        torch.default_generator.manual_seed(seed)
        if cuda_devices:
            torch.cuda.manual_seed(seed)
        for rows in _batches(len(x), training, torch.Generator().manual_seed(seed)):
            rows = rows.to(x.device)
            optimizer.zero_grad()
            loss = training.loss(model(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
            optimizer.step()
            total_loss += loss.detach() * len(rows)
            num_visited += len(rows)
    return float(total_loss) / num_visited


def _batches(
    num_rows: int, training: LocalTraining, generator: torch.Generator
) -> Iterator[Tensor]:
    """Shuffled mini-batches, pass after pass, until the asked epochs or steps are done."""
    num_steps, num_passes = 0, 0
    while training.epochs is None or num_passes < training.epochs:
        order = torch.randperm(num_rows, generator=generator)
        batches = list(torch.split(order, training.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1:
            # BatchNorm cannot train on a single example; let it travel with the batch before.
            batches[-2:] = [torch.cat(batches[-2:])]
        for rows in batches:
            if training.steps is not None and num_steps == training.steps:
                return
            yield rows
            num_steps += 1
        num_passes += 1


def _gradient(model: nn.Module, x: Tensor, y: Tensor, loss: Measure) -> Tensor:
    """Compute the gradient of the mean loss over all examples, in evaluation mode."""
    model.eval()
    model.zero_grad()
    for inputs, targets in zip(
        torch.split(x, EVALUATION_BATCH_SIZE), torch.split(y, EVALUATION_BATCH_SIZE), strict=True
    ):
        part: Tensor = loss(model(inputs), targets) * (len(inputs) / len(x))
        part.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for p in _trainable(model)
    ]
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (param for param in model.parameters() if param.requires_grad)


def _tensors(data: Examples, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(data.x, device=device), torch.as_tensor(data.y, device=device)
