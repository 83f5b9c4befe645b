"""Which examples every model sees when: stacked examples, and the schedule of mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import Examples
from fedbranch.training.example_tensors import example_tensors
from fedbranch.training.hashed_random import permutations
from fedbranch.training.local_training import LocalTraining

__all__ = ["Batch", "Schedule", "StackedExamples", "take", "take_into"]


class StackedExamples:
    """The examples of many models, those of one model after those of another, on the device.

    Attributes
    ----------
    x, y
        Inputs and targets. Which of their rows belong to which model, ``rows`` says.
    sizes
        Shape (num_models,): the number of examples of each model.
    offsets
        Shape (num_models,): the number of examples of all models before it.
    """

    def __init__(
        self, x: Tensor, y: Tensor, sizes: Sequence[int], chosen: Tensor | None = None
    ) -> None:
        self.x = x
        self.y = y
        self.sizes = np.array(sizes)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.offsets = torch.from_numpy(self._starts).to(x.device)
        self._chosen = chosen  # the rows of x and y that are used, in order; None for all
        self._schedule: Schedule | None = None

    @classmethod
    def of(cls, examples: Sequence[Examples], model: nn.Module) -> StackedExamples:
        """Stack the examples of clients, as tensors for a model."""
        pairs = [example_tensors(part, model) for part in examples]
        x, y = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
        return cls(x, y, [len(pair[0]) for pair in pairs])

    def select(self, chosen: Sequence[tuple[int, NDArray[np.intp]]]) -> StackedExamples:
        """Return the stacked examples of other models, in the same memory.

        Parameters
        ----------
        chosen
            For each new model: the number of a model here, and which of its examples to use.
        """
        assert self._chosen is None
        rows = np.concatenate([self._starts[number] + own for number, own in chosen])
        there = torch.from_numpy(rows).to(self.x.device)
        return StackedExamples(self.x, self.y, [len(own) for _, own in chosen], there)

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows of ``x`` and ``y``, for numbers that count all models' examples."""
        return indices if self._chosen is None else self._chosen[indices]

    @property
    def num_bytes(self) -> int:
        """The memory of inputs and targets."""
        return self.x.nbytes + self.y.nbytes

    def schedule(self, training: LocalTraining) -> Schedule:
        """Plan the training on these examples. It is kept, as it is the same every round."""
        if self._schedule is None:
            self._schedule = Schedule(self.sizes, training)
        return self._schedule

    def batches(self, width: int) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Walk over every model's examples, up to ``width`` of each model at a time.

        Yields
        ------
        tuple
            Rows of ``x`` and ``y``, shape (num_models, at most width), and how many of them
            count for each model. A model's first example stands for those that do not count.
        """
        for start in range(0, int(self.sizes.max()), width):
            counts = np.clip(self.sizes - start, 0, width)
            places = start + torch.arange(int(counts.max()), device=self.x.device)
            ends = torch.from_numpy(self.sizes).to(self.x.device)
            own = torch.where(places < ends[:, None], places, 0)
            yield self.rows(self.offsets[:, None] + own), counts


class Schedule:
    """Which examples every model trains on in each step.

    Attributes
    ----------
    num_steps
        The largest number of steps of any model.
    counts
        Shape (num_steps, num_models): the number of examples in each mini-batch; 0 for a model
        that is done.
    width
        The largest count.
    is_even
        Whether all counts are equal.
    """

    def __init__(self, sizes: NDArray[np.int64], training: LocalTraining) -> None:
        self.num_models = len(sizes)
        self._sizes = sizes
        self._per_pass = np.array([training.batches_per_pass(int(size)) for size in sizes])
        self._steps = np.array([training.num_steps(int(size)) for size in sizes])
        self.num_steps = int(self._steps.max())
        step = np.arange(self.num_steps)[:, None]
        self._pass, batch = np.divmod(np.minimum(step, self._steps - 1), self._per_pass)
        self._start = batch * training.batch_size
        is_last = batch == self._per_pass - 1
        counts = np.where(is_last, sizes - self._start, training.batch_size)
        self.counts = np.where(step < self._steps, counts, 0)
        self.width = int(self.counts.max())
        self.is_even = bool((self.counts == self.width).all())

    @property
    def ends_together(self) -> bool:
        """Return whether all models have the same last step."""
        return bool((self._steps == self.num_steps).all())

    def finishing(self, step: int) -> NDArray[np.intp]:
        """Return the numbers of the models that end with this step."""
        return np.flatnonzero(self._steps == step + 1)

    def indices(self, seeds: Tensor, offsets: Tensor) -> Tensor:
        """Return which examples every step uses, shuffled by the models' seeds.

        Parameters
        ----------
        seeds, offsets
            Shape (num_models,): each model's seed, and the number of its first example.

        Returns
        -------
        Tensor
            Shape (num_steps, num_models, width): numbers that count all models' examples. A
            model's first example stands for those that do not count.
        """
        device = seeds.device
        sizes = torch.from_numpy(self._sizes).to(device)
        largest = int(self._sizes.max())
        passes = range(int(self._pass.max()) + 1)
        orders = permutations(seeds, sizes, passes, largest)
        start = torch.from_numpy(self._start).to(device)
        number = torch.from_numpy(self._pass).to(device)
        counts = torch.from_numpy(self.counts).to(device)
        column = torch.arange(self.width, device=device)
        place = (start[:, :, None] + column).clamp(max=largest - 1)
        model = torch.arange(self.num_models, device=device)[None, :, None]
        own = orders[model, number[:, :, None], place]
        return offsets[None, :, None] + torch.where(column < counts[:, :, None], own, 0)


@dataclass(frozen=True)
class Batch:
    """One mini-batch of every model."""

    rows: Tensor  # (num_models, width), of the stacked examples
    counts: Tensor  # (num_models,): the number of first examples that count
    host_counts: NDArray[np.int64]  # the same numbers in the host's memory

    @property
    def has_padding(self) -> bool:
        """Return whether some examples do not count."""
        return bool((self.host_counts != self.rows.shape[1]).any())


def take(values: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of inputs or targets: shape (num_models, num_examples, ...)."""
    taken = values.index_select(0, rows.reshape(-1))
    return taken.reshape(*rows.shape, *values.shape[1:])


def take_into(target: Tensor, values: Tensor, rows: Tensor) -> None:
    """Copy rows of inputs or targets into memory that a recorded graph reads."""
    flat = target.view(-1, *values.shape[1:])
    torch.index_select(values, 0, rows.reshape(-1), out=flat)
