"""One client in PyTorch: from parameters and data to an update.

Readable first: the simulator's faster paths must give the same results as these functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import Examples
from fedbranch.halves import half_rows, training_seeds
from fedbranch.messages import Task, Trial, Update
from fedbranch.randomness import SeededDropout, permutations
from fedbranch.tree import Vector

__all__ = [
    "LocalTraining",
    "ModelState",
    "accuracy",
    "adam",
    "cross_entropy",
    "evaluate",
    "local_update",
    "sgd",
    "trial_losses",
]

OptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
# Outputs of the model and targets, both with one row for each example, to a mean over them.
Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Precision: TypeAlias = Literal["float32", "tf32", "bf16"]

EVALUATION_BATCH_SIZE = 1024


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the share of rows whose largest output is at the target."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the mean cross-entropy of a classifier's outputs, one column for each class."""
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
        How long: passes over the client's data, or mini-batches. Exactly one of them.
    batch_size
        Examples per mini-batch. The last one of a pass may be smaller; a single example
        that is left over travels with the batch before it, because BatchNorm could not
        train on it.
    loss
        Maps outputs and targets to the mean loss; by default the cross-entropy.
    metrics
        Further measures for evaluation, by name; by default the accuracy if the loss is
        the cross-entropy.
    send_gradient
        Send the negative full-batch gradient as the signal to compare, beside the update.
    precision
        Of products: ``"float32"``; ``"tf32"``, the same but for NVIDIA GPUs, which may then
        round the factors to 11 bits; ``"bf16"``, automatic mixed precision in bfloat16.

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
        """The same training on half of the data: twice the epochs, or as many steps."""
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
        """Count the mini-batches of one pass over so many rows."""
        whole, left_over = divmod(num_rows, self.batch_size)
        joins_the_last = left_over == 1 < self.batch_size and whole > 0
        return whole + (left_over > 0 and not joins_the_last)

    def num_steps(self, num_rows: int) -> int:
        """Count the mini-batches that a client with so many rows trains on."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * self.batches_per_pass(num_rows)

    def num_visits(self, num_rows: int) -> int:
        """Count the examples in all those mini-batches."""
        passes, steps = divmod(self.num_steps(num_rows), self.batches_per_pass(num_rows))
        return passes * num_rows + steps * self.batch_size

    def describe(self, model: nn.Module) -> dict[str, str]:
        """Say everything that the result depends on, to recognise the same training again."""
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


@dataclass(frozen=True, eq=False)
class ModelState:
    """All numbers of a model that training changes, as two flat vectors.

    Attributes
    ----------
    params
        Shape (num_params,): the trainable parameters, complex ones as pairs.
    buffers
        Shape (num_buffers,), float64, which also holds counters exactly: the buffers, such
        as BatchNorm statistics.
    """

    params: Tensor
    buffers: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Copy a model's state."""
        params = [_real(p.detach()).reshape(-1) for p in trainable(model)]
        if not params:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        buffers = [_real(b.detach()).reshape(-1).double() for b in model.buffers()]
        no_buffers = params[0].new_zeros(0, dtype=torch.float64)
        return cls(torch.cat(params), torch.cat(buffers) if buffers else no_buffers)

    def moved_by(self, params_step: Vector, buffers_step: Vector) -> ModelState:
        """Give the state that is displaced by these steps."""
        device = self.params.device
        return ModelState(
            self.params + torch.tensor(params_step, device=device),
            self.buffers + torch.tensor(buffers_step, device=device),
        )

    def minus(self, before: ModelState) -> tuple[Vector, Vector]:
        """Give the steps that lead from another state to this one."""
        params = self.params - before.params
        # A mask of infinities that did not change has moved by 0, not by infinity - infinity.
        moved = (self.buffers != before.buffers) & ~(self.buffers.isnan() & before.buffers.isnan())
        buffers = torch.where(moved, self.buffers - before.buffers, 0.0)
        return params.float().cpu().numpy(), buffers.float().cpu().numpy()

    def digest(self) -> str:
        """Name these numbers by a hash of their bytes."""
        parts = (self.params.double(), self.buffers)
        content = b"".join(part.cpu().numpy().tobytes() for part in parts)
        return hashlib.sha256(content).hexdigest()

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Overwrite a model's state with this one. Whole-number buffers are rounded."""
        start = 0
        for param in map(_real, trainable(model)):
            values = self.params[start : start + param.numel()]
            param.copy_(values.view_as(param))
            start += param.numel()
        start = 0
        for buffer in map(_real, model.buffers()):
            values = self.buffers[start : start + buffer.numel()].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
            start += buffer.numel()


def local_update(
    model: nn.Module,
    initial: ModelState,
    task: Task,
    data: Examples | tuple[Tensor, Tensor],
    training: LocalTraining,
    *,
    seed: int,
    halves_seed: int | None = None,
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
        For the order of the examples and for dropout; see :mod:`fedbranch.randomness`.
    halves_seed
        The client's seed for its halves, from :func:`fedbranch.halves.halves_seed`. Without
        it, or with too few examples, the client trains on all of them also if the task asks
        for halves.

    Returns
    -------
    Update
        After minus before, with the training loss of the examples as they were visited. If
        the task asks for halves, the mean of both halves' updates, and half their difference
        (or that of their signals, if these are sent). Each half takes as many steps as the
        whole would, so that such a round leads as far as any other; see
        :attr:`LocalTraining.on_a_half`.
    """
    x, y = tensors(data, model)
    halves = None
    if task.halves is not None and halves_seed is not None:
        halves = half_rows(len(x), halves_seed, task.halves)
    if halves is None:
        return _trained(model, initial, task, x, y, training, seed)
    a, b = (
        _trained(model, initial, task, *_taken(x, y, rows), training.on_a_half, own_seed)
        for rows, own_seed in zip(halves, training_seeds(seed), strict=True)
    )
    return _of_both_halves(a, b, training)


def _trained(
    model: nn.Module,
    initial: ModelState,
    task: Task,
    x: Tensor,
    y: Tensor,
    training: LocalTraining,
    seed: int,
) -> Update:
    initial.moved_by(task.params, task.buffers).load_into(model)
    before = ModelState.of(model)  # as the model's own precision holds it
    with products_in(training.precision, x.device):
        signal = _gradient(model, x, y, training, seed) if training.send_gradient else None
        loss = _train(model, x, y, training, seed)
    vector, buffers = ModelState.of(model).minus(before)
    return Update(
        vector=vector,
        num_examples=len(x),
        metrics={"loss": loss},
        buffers=buffers,
        base=task.base,
        signal=None if signal is None else -signal.float().cpu().numpy(),
    )


def _of_both_halves(a: Update, b: Update, training: LocalTraining) -> Update:
    assert a.buffers is not None
    assert b.buffers is not None
    visits = [training.on_a_half.num_visits(int(half.num_examples)) for half in (a, b)]
    losses = [half.metrics["loss"] for half in (a, b)]
    half_difference, signal = (a.vector - b.vector) / 2, None
    if a.signal is not None and b.signal is not None:
        half_difference, signal = (a.signal - b.signal) / 2, (a.signal + b.signal) / 2
    return Update(
        vector=(a.vector + b.vector) / 2,
        num_examples=a.num_examples + b.num_examples,
        metrics={"loss": float(np.average(losses, weights=visits))},
        buffers=(a.buffers + b.buffers) / 2,
        base=a.base,
        signal=signal,
        half_difference=half_difference,
    )


def _taken(x: Tensor, y: Tensor, rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
    places = torch.from_numpy(rows).to(x.device)
    return x[places], y[places]


def trial_losses(
    model: nn.Module,
    initial: ModelState,
    trials: Sequence[Trial],
    train: Examples | tuple[Tensor, Tensor],
    held_out: Examples | tuple[Tensor, Tensor] | None,
    training: LocalTraining,
    *,
    halves_seed: int,
) -> tuple[float, ...] | None:
    """Measure a client's mean loss under models that the server wants to try, in turn.

    Parameters
    ----------
    model
        Where to measure. Its own parameters are overwritten.
    initial
        The initial model θ0, from which the trials' parameters are displacements.
    trials
        What the server wants to know.
    train, held_out
        The client's training examples, whose halves trials may be about, and those that it
        holds out for decisions, if it has any.
    training
        Its loss.
    halves_seed
        As for :func:`local_update`.

    Returns
    -------
    tuple or None
        One loss for each trial; None if the client lacks the examples of any of them.
    """
    only_loss = replace(training, metrics={})
    losses = []
    for trial in trials:
        data = held_out
        if trial.on != "held-out":
            assert trial.halves is not None
            x, y = tensors(train, model)
            halves = half_rows(len(x), halves_seed, trial.halves)
            data = None if halves is None else _taken(x, y, halves[trial.on == "second half"])
        if data is None:
            return None
        initial.moved_by(trial.params, trial.buffers).load_into(model)
        losses.append(evaluate(model, data, only_loss)["loss"])
    return tuple(losses)


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Examples | tuple[Tensor, Tensor], training: LocalTraining
) -> dict[str, float]:
    """Measure a model on examples, in evaluation mode.

    Returns
    -------
    dict
        ``"loss"`` and every metric of ``training``, each a mean over the examples.
    """
    totals = dict.fromkeys(training.measures, 0.0)
    x, y = tensors(data, model)
    was_training = model.training
    model.eval()
    with _lent_randomness(0, x.device), products_in(training.precision, x.device):
        for inputs, targets in _evaluation_batches(x, y):
            with mixed_precision(training.precision, x.device):
                outputs = model(inputs)
            for name, measure in training.measures.items():
                totals[name] += float(measure(outputs, targets)) * len(inputs)
    model.train(was_training)
    return {name: total / len(x) for name, total in totals.items()}


def _train(model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining, seed: int) -> float:
    """Train in place; give the mean loss over all visited examples."""
    optimizer = training.optimizer(list(trainable(model)))
    total_loss, num_visited = torch.zeros((), device=x.device), 0
    stream = torch.tensor(seed, device=x.device)
    has_dropout = True  # until the first mini-batch shows that there is none
    model.train()
    with _lent_randomness(seed, x.device):
        for step, rows in enumerate(_batches(len(x), training, stream)):
            inputs, targets = x[rows], y[rows]
            dropout = SeededDropout(stream, step) if has_dropout else nullcontext()

            # As a closure, because some optimisers ask for the loss several times a step.
            def loss_with_gradient(
                inputs: Tensor = inputs,
                targets: Tensor = targets,
                dropout: AbstractContextManager[object] = dropout,
            ) -> Tensor:
                optimizer.zero_grad()
                with dropout, mixed_precision(training.precision, x.device):
                    loss: Tensor = training.loss(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
                return loss.detach()

            loss = cast("Tensor", optimizer.step(cast("Any", loss_with_gradient)))
            total_loss += loss.detach() * len(rows)
            num_visited += len(rows)
            has_dropout = isinstance(dropout, SeededDropout) and dropout.num_calls > 0
    return float(total_loss) / num_visited


@contextmanager
def _lent_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, which dropout draws from, and give them back as they were."""
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices):
        torch.default_generator.manual_seed(seed)
        if cuda_devices:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """Let GPUs round the factors of products or not, and give the settings back as they were."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    settings = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = settings


def mixed_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Give the context for a model's forward pass."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def _batches(num_rows: int, training: LocalTraining, seed: Tensor) -> Iterator[Tensor]:
    """Shuffled mini-batches, pass after pass, until the asked epochs or steps are done."""
    sizes = torch.tensor([num_rows], device=seed.device)
    num_batches = training.batches_per_pass(num_rows)
    for step in range(training.num_steps(num_rows)):
        this_pass, batch = divmod(step, num_batches)
        if batch == 0:
            order = permutations(seed[None], sizes, [this_pass], num_rows)[0, 0]
        start = batch * training.batch_size
        end = start + training.batch_size if batch < num_batches - 1 else num_rows
        yield order[start:end]


def _gradient(model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining, seed: int) -> Tensor:
    """Compute the gradient of the mean loss over all examples, in evaluation mode."""
    model.eval()
    model.zero_grad()
    with _lent_randomness(seed, x.device):
        for inputs, targets in _evaluation_batches(x, y):
            with mixed_precision(training.precision, x.device):
                mean: Tensor = training.loss(model(inputs), targets)
            part = mean * (len(inputs) / len(x))
            part.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.cat([_real(gradient.detach()).reshape(-1) for gradient in dense])


def _evaluation_batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = EVALUATION_BATCH_SIZE
    for inputs, targets in zip(torch.split(x, size), torch.split(y, size), strict=True):
        yield inputs.clone(), targets  # a model may write into its inputs, and they are the user's


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (param for param in model.parameters() if param.requires_grad)


def _real(tensor: Tensor) -> Tensor:
    """See complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def tensors(data: Examples | tuple[Tensor, Tensor], model: nn.Module) -> tuple[Tensor, Tensor]:
    """Bring examples to the model's device, floating ones also to its precision."""
    param = next(model.parameters())
    precision = param.dtype if param.is_floating_point() else None

    def tensor(array: NDArray[Any] | Tensor) -> Tensor:
        if isinstance(array, Tensor):  # prepared before
            return array
        # A copy where the array is read-only: torch warns that it could be written to.
        own = array if array.flags.writeable else array.copy()
        dtype = precision if np.issubdtype(own.dtype, np.floating) else None
        return torch.as_tensor(own, device=param.device, dtype=dtype)

    x, y = data
    return tensor(x), tensor(y)
