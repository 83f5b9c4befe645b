"""One client in PyTorch: from parameters and data to an update, or to losses.

These functions are the reference. They are written to be read; the simulator's faster engines
must give the same results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import Examples
from fedbranch.protocol.tasks import Task, Trial, Update
from fedbranch.training.example_tensors import example_tensors
from fedbranch.training.half_split import half_rows, training_seeds
from fedbranch.training.hashed_random import SeededDropout, permutations
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState, as_real, trainable
from fedbranch.training.precision import mixed_precision, products_in

__all__ = ["EVALUATION_BATCH_SIZE", "evaluate", "local_update", "trial_losses"]

EVALUATION_BATCH_SIZE = 1024


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
    """Train one client for a round: load the task's parameters, train, return the update.

    Parameters
    ----------
    model
        The model to train in. Its parameters and buffers are overwritten.
    initial
        The initial model θ0. The task's parameters are displacements from it.
    task
        What the server planned for this client.
    data
        The client's training examples.
    training
        How to train.
    seed
        Seeds the order of the examples and dropout; see :mod:`fedbranch.training.hashed_random`.
    halves_seed
        The client's seed for its halves, from
        :func:`fedbranch.training.half_split.halves_seed`. Without it, or with too few
        examples, the client trains on all examples even if the task asks for halves.

    Returns
    -------
    Update
        After minus before, with the mean training loss over all visits to examples.

        If the task asks for halves, the update is the mean of both halves' updates. It comes
        with the half difference: half the difference of these updates, or of the signals if
        signals are sent. Each half takes as many steps as all examples would, so that such
        a round moves the parameters as far as any other; see
        :attr:`LocalTraining.on_a_half`.
    """
    x, y = example_tensors(data, model)
    halves = None
    if task.halves is not None and halves_seed is not None:
        halves = half_rows(len(x), halves_seed, task.halves)
    if halves is None:
        return _trained(model, initial, task, x, y, training, seed)
    a, b = (
        _trained(model, initial, task, *_taken(x, y, rows), training.on_a_half, own_seed)
        for rows, own_seed in zip(halves, training_seeds(seed), strict=True)
    )
    return _joined_halves(a, b, training)


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
    before = ModelState.of(model)  # rounded to the model's own precision
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


def _joined_halves(a: Update, b: Update, training: LocalTraining) -> Update:
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
    chosen = torch.from_numpy(rows).to(x.device)
    return x[chosen], y[chosen]


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
    """Measure a client's mean loss under each model that the server wants to try.

    Parameters
    ----------
    model
        The model to measure in. Its parameters and buffers are overwritten.
    initial
        The initial model θ0. The trials' parameters are displacements from it.
    trials
        The models to try, and which examples to measure each of them on.
    train
        The client's training examples. A trial may ask for one half of them.
    held_out
        The examples that the client holds out for decisions; None if it has none.
    training
        Its loss is measured.
    halves_seed
        As for :func:`local_update`.

    Returns
    -------
    tuple or None
        One loss for each trial, in the same order. None if the client lacks the examples of
        any trial.
    """
    only_loss = replace(training, metrics={})
    losses = []
    for trial in trials:
        data = held_out
        if trial.on != "held-out":
            assert trial.halves is not None
            x, y = example_tensors(train, model)
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

    The model's mode and torch's global random state are restored afterwards.

    Returns
    -------
    dict
        ``"loss"`` and every metric of ``training``, each a mean over the examples.
    """
    totals = dict.fromkeys(training.measures, 0.0)
    x, y = example_tensors(data, model)
    was_training = model.training
    model.eval()
    with _seeded_globally(0, x.device), products_in(training.precision, x.device):
        for inputs, targets in _evaluation_batches(x, y):
            with mixed_precision(training.precision, x.device):
                outputs = model(inputs)
            for name, measure in training.measures.items():
                totals[name] += float(measure(outputs, targets)) * len(inputs)
    model.train(was_training)
    return {name: total / len(x) for name, total in totals.items()}


def _train(model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining, seed: int) -> float:
    """Train in place and return the mean loss over all visits to examples."""
    optimizer = training.optimizer(list(trainable(model)))
    total_loss, num_visited = torch.zeros((), device=x.device), 0
    stream = torch.tensor(seed, device=x.device)
    has_dropout = True  # until the first mini-batch shows that there is none
    model.train()
    with _seeded_globally(seed, x.device):
        for step, rows in enumerate(_batches(len(x), training, stream)):
            inputs, targets = x[rows], y[rows]
            dropout = SeededDropout(stream, step) if has_dropout else nullcontext()

            # A closure, because some optimisers compute the loss several times in one step.
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
def _seeded_globally(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators for the model's own draws, and restore them afterwards."""
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices):
        torch.default_generator.manual_seed(seed)
        if cuda_devices:
            torch.cuda.manual_seed(seed)
        yield


def _batches(num_rows: int, training: LocalTraining, seed: Tensor) -> Iterator[Tensor]:
    """Yield the rows of shuffled mini-batches, pass after pass, for all epochs or steps."""
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
    with _seeded_globally(seed, x.device):
        for inputs, targets in _evaluation_batches(x, y):
            with mixed_precision(training.precision, x.device):
                mean: Tensor = training.loss(model(inputs), targets)
            part = mean * (len(inputs) / len(x))
            part.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.cat([as_real(gradient.detach()).reshape(-1) for gradient in dense])


def _evaluation_batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = EVALUATION_BATCH_SIZE
    for inputs, targets in zip(torch.split(x, size), torch.split(y, size), strict=True):
        yield inputs.clone(), targets  # a model may write into its inputs: the user's arrays
