"""Which rows every client sees when: shelves of examples, and the schedule of mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import Examples
from fedbranch.training.client import tensors
from fedbranch.training.hashed_random import permutations
from fedbranch.training.local_training import LocalTraining

__all__ = ["Batch", "Schedule", "Shelf", "groups", "select_into", "selected"]


class Shelf:
    """The rows of several clients behind each other, on the device."""

    def __init__(
        self, x: Tensor, y: Tensor, sizes: Sequence[int], chosen: Tensor | None = None
    ) -> None:
        self.x = x
        self.y = y
        self.sizes = np.array(sizes)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.offsets = torch.from_numpy(self._starts).to(x.device)
        self._chosen = chosen  # which rows of x and y stand behind each other; all if None
        self._schedule: Schedule | None = None

    @classmethod
    def of(cls, examples: Sequence[Examples], model: nn.Module) -> Shelf:
        """Lay out the examples of clients."""
        pairs = [tensors(part, model) for part in examples]
        x, y = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
        return cls(x, y, [len(pair[0]) for pair in pairs])

    def parts(self, rows: Sequence[tuple[int, NDArray[np.intp]]]) -> Shelf:
        """See some rows of some clients as the rows of others, in the same memory.

        Parameters
        ----------
        rows
            The position of a client on this shelf, and which of its rows.
        """
        assert self._chosen is None
        places = np.concatenate([self._starts[position] + own for position, own in rows])
        chosen = torch.from_numpy(places).to(self.x.device)
        return Shelf(self.x, self.y, [len(own) for _, own in rows], chosen)

    def places(self, rows: Tensor) -> Tensor:
        """Say where in ``x`` and ``y`` rows are, counted from the first client's first."""
        return rows if self._chosen is None else self._chosen[rows]

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""
        return self.x.nbytes + self.y.nbytes

    def schedule(self, training: LocalTraining) -> Schedule:
        """Plan the training on these rows; kept, because it is the same every round."""
        if self._schedule is None:
            self._schedule = Schedule(self.sizes, training)
        return self._schedule

    def blocks(self, width: int) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Walk over every client's rows: which rows, (num_clients, width), and how many count."""
        for start in range(0, int(self.sizes.max()), width):
            counts = np.clip(self.sizes - start, 0, width)
            places = start + torch.arange(int(counts.max()), device=self.x.device)
            ends = torch.from_numpy(self.sizes).to(self.x.device)
            own = torch.where(places < ends[:, None], places, 0)
            yield self.places(self.offsets[:, None] + own), counts


class Schedule:
    """Which rows every client trains on in each step."""

    def __init__(self, sizes: NDArray[np.int64], training: LocalTraining) -> None:
        self.num_clients = len(sizes)
        self._sizes = sizes
        self._per_pass = np.array([training.batches_per_pass(int(size)) for size in sizes])
        self._steps = np.array([training.num_steps(int(size)) for size in sizes])
        self.num_steps = int(self._steps.max())
        step = np.arange(self.num_steps)[:, None]
        self._pass, batch = np.divmod(np.minimum(step, self._steps - 1), self._per_pass)
        self._start = batch * training.batch_size
        is_last = batch == self._per_pass - 1
        counts = np.where(is_last, sizes - self._start, training.batch_size)
        # Shape (num_steps, num_clients): how many rows; 0 when a client is done.
        self.counts = np.where(step < self._steps, counts, 0)
        self.width = int(self.counts.max())
        self.is_even = bool((self.counts == self.width).all())

    @property
    def ends_together(self) -> bool:
        """Whether all clients have the same last step."""
        return bool((self._steps == self.num_steps).all())

    def finishing(self, step: int) -> NDArray[np.intp]:
        """Give the positions of the clients whose last step this is."""
        return np.flatnonzero(self._steps == step + 1)

    def rows(self, seeds: Tensor, offsets: Tensor) -> Tensor:
        """Give the rows of all steps: shape (num_steps, num_clients, width)."""
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
        client = torch.arange(self.num_clients, device=device)[None, :, None]
        rows = orders[client, number[:, :, None], place]
        return offsets[None, :, None] + torch.where(column < counts[:, :, None], rows, 0)


@dataclass(frozen=True)
class Batch:
    """One mini-batch of every client."""

    rows: Tensor  # (num_clients, width)
    counts: Tensor  # (num_clients,): how many of them count
    known_counts: NDArray[np.int64]  # the same, without asking the device

    @property
    def has_padding(self) -> bool:
        """Whether some rows do not count."""
        return bool((self.known_counts != self.rows.shape[1]).any())


def groups(
    counts: NDArray[np.int64], *, pads: bool, width: int
) -> Iterator[tuple[NDArray[np.intp] | None, NDArray[np.int64]]]:
    """Say which lanes go together, None for all of them, and how many rows each of them has."""
    if pads or bool((counts == width).all()):
        yield None, counts
        return
    for count in np.unique(counts[counts > 0]):
        lanes = np.flatnonzero(counts == count)
        yield lanes, counts[lanes]


def selected(shelf: Tensor, rows: Tensor) -> Tensor:
    """Take rows: shape (num_lanes, num_rows, ...)."""
    taken = shelf.index_select(0, rows.reshape(-1))
    return taken.reshape(*rows.shape, *shelf.shape[1:])


def select_into(target: Tensor, shelf: Tensor, rows: Tensor) -> None:
    """Take rows to where a recorded graph looks for them."""
    flat = target.view(-1, *shelf.shape[1:])
    torch.index_select(shelf, 0, rows.reshape(-1), out=flat)
