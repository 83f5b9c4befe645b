"""The vectorised engine: all clients of a round, whatever their leaf, as one stack of models.

Clients of several sizes train together. Where the model treats every row by itself, a batch
is padded with the client's own first row, which does not count; where it does not
(BatchNorm), only batches of the same size go together. A client that is done is set aside:
what its row goes on computing is nobody's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.client import (
    EVALUATION_BATCH_SIZE,
    LocalTraining,
    ModelState,
    products_in,
    tensors,
)
from fedbranch.core.geometry import Array
from fedbranch.data import ClientData, Examples
from fedbranch.errors import ClientFailed
from fedbranch.messages import Task, UpdateBatch
from fedbranch.randomness import permutations
from fedbranch.sim.reference import Reference
from fedbranch.sim.stacked_model import CannotStack, Stack, StackedModel
from fedbranch.tree import Node

__all__ = ["Vectorised"]

Result = TypeVar("Result")

# What a chunk of clients may take in memory. The larger, the less overhead per client.
CPU_CHUNK_BYTES = 2**29
GPU_MEMORY_SHARE = 0.2
KEPT_LANES = 3
# Clients in one chunk may have this share of the largest one's steps, or more: beyond their
# own steps they only wait.
LEAST_STEPS_SHARE = 0.75


class Vectorised:
    """Trains and measures many clients at once; see :class:`fedbranch.sim.engines.Engine`.

    Raises
    ------
    CannotStack
        If the model, its training or the clients' data do not allow it.
    """

    name = "vectorised"

    def __init__(
        self,
        model: nn.Module,
        initial: ModelState,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
    ) -> None:
        self.initial = initial
        self.training = training
        self.device = initial.params.device
        self._model = model
        self._clients = clients
        self._reference = Reference(model, initial, clients, training)
        _check_shapes(clients)
        largest = max((client.train for client in clients.values()), key=lambda part: len(part.x))
        with products_in(training.precision, self.device):
            self.stacked = StackedModel(model, training, *tensors(largest, model))
        self.pads = self.stacked.rows_are_independent and self.stacked.measures_rows["loss"]
        self._row_bytes = self._measured_row_bytes(largest)
        self._num_steps = {i: training.num_steps(len(c.train.x)) for i, c in clients.items()}
        self._shelves: dict[tuple[str, ...], _Shelf] = {}
        self._lanes: dict[tuple[object, ...], _Lanes] = {}

    # Training

    def updates(self, tasks: Mapping[str, Task], seeds: Mapping[str, int]) -> UpdateBatch:
        """Let every client with a task train."""
        ids = list(tasks)
        sizes = {i: len(self._clients[i].train.x) for i in ids}
        chunks, parts = [], []
        for chunk, trained in self._in_turn(
            self._chunks(ids, sizes, self.training.batch_size + 1),
            lambda chunk: self._train(chunk, tasks, seeds),
            lambda client_id: self._reference.updates({client_id: tasks[client_id]}, seeds),
        ):
            chunks.append(chunk)
            parts.append(trained)
        self._forget_shelves("training", but=chunks)
        ordered = [client_id for chunk in chunks for client_id in chunk]
        return UpdateBatch(
            client_ids=ordered,
            vectors=_to_server(_joined([part.vectors for part in parts])),
            num_examples=[sizes[i] for i in ordered],
            bases=[tasks[i].base for i in ordered],
            metrics=[{"loss": loss} for part in parts for loss in part.losses.tolist()],
            buffers=_to_server(_joined([part.buffers for part in parts])),
            signals=_to_server(
                _joined([part.signals for part in parts if part.signals is not None])
            )
            if self.training.send_gradient
            else None,
        )

    def _train(
        self, ids: Sequence[str], tasks: Mapping[str, Task], seeds: Mapping[str, int]
    ) -> _Trained:
        shelf = self._shelf(ids, "train", "training")
        schedule = shelf.schedule(self.training)
        before, before_buffers = self._states([tasks[i] for i in ids])
        start = self.stacked.stack(before, before_buffers)
        if self.stacked.precision != before.dtype or start.buffers:
            # As the model's own precision holds them.
            before = StackedModel.flat(start.params, before)
            before_buffers = StackedModel.flat(start.buffers, before_buffers)
        seed = torch.tensor([seeds[i] for i in ids], device=self.device)
        signals = self._gradients(start, shelf) if self.training.send_gradient else None
        lanes = self._lanes_for(schedule)
        lanes.load(start, seed)
        after, after_buffers = torch.empty(before.shape), torch.empty(before_buffers.shape)
        if not schedule.ends_together:
            after = torch.empty(before.shape, dtype=before.dtype, device=self.device)
            after_buffers = torch.empty(
                before_buffers.shape, dtype=before_buffers.dtype, device=self.device
            )
        rows_of_step = schedule.rows(seed, shelf.offsets)
        counts_of_step = torch.from_numpy(schedule.counts).to(self.device)
        for step in range(schedule.num_steps):
            batch = _Batch(rows_of_step[step], counts_of_step[step], schedule.counts[step])
            lanes.step(step, shelf, batch)
            done = schedule.finishing(step)
            if len(done) == len(ids):
                after = StackedModel.flat(lanes.stack.params, before)
                after_buffers = StackedModel.flat(lanes.stack.buffers, before_buffers)
            elif len(done):
                rows = torch.from_numpy(done).to(self.device)
                now = Stack(*({k: t[rows] for k, t in part.items()} for part in lanes.stack))
                after[rows] = StackedModel.flat(now.params, before[rows])
                after_buffers[rows] = StackedModel.flat(now.buffers, before_buffers[rows])
        # A mask of infinities that did not change has moved by 0, not by infinity - infinity.
        moved = (after_buffers != before_buffers) & ~(
            after_buffers.isnan() & before_buffers.isnan()
        )
        return _Trained(
            vectors=(after - before).float(),
            buffers=torch.where(moved, after_buffers - before_buffers, 0.0).float(),
            signals=signals,
            losses=lanes.total_loss.double().cpu().numpy() / schedule.counts.sum(axis=0),
        )

    def _gradients(self, stack: Stack, shelf: _Shelf) -> Tensor:
        """Give the negative gradients of the mean loss over all of every client's rows."""
        params = {name: p.detach().requires_grad_() for name, p in stack.params.items()}
        total = [torch.zeros_like(param) for param in params.values()]
        for rows, counts in shelf.blocks(EVALUATION_BATCH_SIZE):
            share = torch.from_numpy(counts / shelf.sizes).to(self.device, torch.float32)
            losses = torch.zeros(len(counts), device=self.device)
            for lanes, own_counts in _groups(counts, pads=self.pads, width=rows.shape[1]):
                part = _Part(Stack(params, stack.buffers), rows, lanes, own_counts)
                outputs, y = part.outputs(self.stacked, shelf, train=False)
                means = self.stacked.means(self.training.loss, outputs, y, part.counts)
                losses = losses.index_add(0, part.lanes, means.to(losses.dtype))
            found = torch.autograd.grad(
                (losses * share).sum(), list(params.values()), allow_unused=True
            )
            for sum_, gradient in zip(total, found, strict=True):
                if gradient is not None:
                    sum_ += gradient
        return -torch.cat([g.reshape(len(g), -1) for g in total], dim=1).float()

    # Measuring

    def measure(
        self, at: Mapping[str, Node], part: Literal["train", "test"]
    ) -> dict[str, dict[str, float]]:
        """Measure clients on their data, each under the model of a node."""
        ids = [i for i in at if getattr(self._clients[i], part) is not None]
        sizes = {i: len(getattr(self._clients[i], part).x) for i in ids}
        measured: dict[str, dict[str, float]] = {}
        chunks = list(self._chunks(ids, sizes, EVALUATION_BATCH_SIZE, for_training=False))
        self._forget_shelves(f"measuring {part}", but=chunks)
        for chunk, values in self._in_turn(
            chunks,
            lambda chunk: self._measure(chunk, at, part),
            lambda client_id: self._reference.measure({client_id: at[client_id]}, part),
        ):
            for row, client_id in enumerate(chunk):
                measured[client_id] = {name: float(v[row]) for name, v in values.items()}
        return measured

    @torch.no_grad()
    def _measure(
        self, ids: Sequence[str], at: Mapping[str, Node], part: Literal["train", "test"]
    ) -> dict[str, NDArray[np.float64]]:
        shelf = self._shelf(ids, part, f"measuring {part}")
        stack = self.stacked.stack(*self._states([at[i] for i in ids]))
        measures = self.training.measures
        can_pad = self.stacked.rows_are_independent and all(self.stacked.measures_rows.values())
        totals = {
            name: torch.zeros(len(ids), dtype=torch.float64, device=self.device)
            for name in measures
        }
        for rows, counts in shelf.blocks(EVALUATION_BATCH_SIZE):
            for lanes, own_counts in _groups(counts, pads=can_pad, width=rows.shape[1]):
                group = _Part(stack, rows, lanes, own_counts)
                outputs, y = group.outputs(self.stacked, shelf, train=False)
                for name, measure in measures.items():
                    means = self.stacked.means(measure, outputs, y, group.counts).double()
                    totals[name].index_add_(0, group.lanes, means * group.num_rows)
        return {name: total.cpu().numpy() / shelf.sizes for name, total in totals.items()}

    # What both need

    def _in_turn(
        self,
        chunks: Iterable[list[str]],
        together: Callable[[list[str]], Result],
        alone: Callable[[str], object],
    ) -> Iterator[tuple[list[str], Result]]:
        """Do the work chunk by chunk; where memory does not suffice, in halves."""
        waiting = list(chunks)[::-1]
        while waiting:
            chunk = waiting.pop()
            try:
                with products_in(self.training.precision, self.device):
                    result = together(chunk)
            except torch.OutOfMemoryError:
                if len(chunk) == 1:
                    raise
                self._lanes.clear()
                self._shelves.clear()
                torch.cuda.empty_cache()
                half = len(chunk) // 2
                waiting += [chunk[half:], chunk[:half]]
                continue
            except Exception as error:
                for client_id in chunk:
                    alone(client_id)  # raises, with its name, if it is this client's fault
                raise ClientFailed(
                    f"{len(chunk)} clients could not be trained or measured as one stack: {error}; "
                    "take engine='reference'"
                ) from error
            yield chunk, result

    def _states(self, places: Sequence[Task | Node]) -> tuple[Tensor, Tensor]:
        """Give the parameters and buffers at nodes, one row for each place."""
        number: dict[int, int] = {}
        unique: list[Task | Node] = []
        for place in places:
            if id(place.params) not in number:
                number[id(place.params)] = len(unique)
                unique.append(place)
        chosen = torch.tensor([number[id(place.params)] for place in places], device=self.device)
        flat = []
        for name in ("params", "buffers"):
            moved = torch.from_numpy(np.stack([getattr(place, name) for place in unique]))
            states = getattr(self.initial, name) + moved.to(self.device)
            is_one = len(unique) == 1
            flat.append(states.expand(len(places), -1) if is_one else states[chosen])
        return flat[0], flat[1]

    def _shelf(self, ids: Sequence[str], part: Literal["train", "test"], purpose: str) -> _Shelf:
        """Lay the rows of clients behind each other; kept while the same are asked for."""
        key = (purpose, *ids)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = _Shelf([getattr(self._clients[i], part) for i in ids], self._model)
            kept = sum(other.num_bytes for other in self._shelves.values())
            if kept + shelf.num_bytes <= self._kept_bytes:
                self._shelves[key] = shelf
        return shelf

    def _forget_shelves(self, purpose: str, but: Iterable[list[str]]) -> None:
        """Drop the rows of clients that were not asked for this time."""
        asked = {(purpose, *ids) for ids in but}
        for key in [key for key in self._shelves if key[0] == purpose and key not in asked]:
            del self._shelves[key]

    @property
    def _kept_bytes(self) -> float:
        return self._memory if self.device.type == "cuda" else 2**28

    @property
    def _memory(self) -> float:
        total: int = torch.cuda.get_device_properties(self.device).total_memory
        return GPU_MEMORY_SHARE * total

    def _chunks(
        self, ids: Sequence[str], sizes: Mapping[str, int], width: int, *, for_training: bool = True
    ) -> Iterator[list[str]]:
        """Cut clients into chunks of similar length that fit into memory."""
        budget = self._memory if self.device.type == "cuda" else CPU_CHUNK_BYTES
        copies = 6 if for_training else 2  # parameters, gradients, optimiser state, results
        rows = min(width, max(sizes.values(), default=1))
        per_client = 4 * copies * self.initial.params.numel() + rows * self._row_bytes
        largest = max(1, int(budget / per_client))
        length = self._num_steps if for_training else sizes
        ordered = sorted(ids, key=lambda client_id: -length[client_id])  # stable
        chunk: list[str] = []
        for client_id in ordered:
            is_short = chunk and length[client_id] < LEAST_STEPS_SHARE * length[chunk[0]]
            if len(chunk) == largest or is_short:
                yield chunk
                chunk = []
            chunk.append(client_id)
        if chunk:
            yield chunk

    def _lanes_for(self, schedule: _Schedule) -> _Lanes:
        shape = (schedule.num_clients, schedule.width, schedule.is_even)
        if shape not in self._lanes:
            if len(self._lanes) == KEPT_LANES:  # or memory would not be bounded
                self._lanes.pop(next(iter(self._lanes)))
            self._lanes[shape] = _Lanes(
                self.stacked,
                self.training,
                pads=self.pads and not schedule.is_even,
                goes_together=self.pads or schedule.is_even,
            )
        return self._lanes[shape]

    def _measured_row_bytes(self, examples: Examples) -> int:
        """Measure what the model remembers of one row for its gradient."""
        x, y = (part[:2] for part in tensors(examples, self._model))
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            seen[tensor.data_ptr()] = max(tensor.nbytes, seen.get(tensor.data_ptr(), 0))
            return tensor

        model = self._model.train()
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            self.training.loss(model(x), y)
        own = {param.data_ptr() for param in model.parameters()}
        kept = sum(size for pointer, size in seen.items() if pointer not in own)
        return max(1, 3 * kept // len(x) + x.element_size() * x[0].numel())

    def close(self) -> None:
        """Nothing is left behind."""


@dataclass(frozen=True)
class _Trained:
    vectors: Tensor
    buffers: Tensor
    signals: Tensor | None
    losses: NDArray[np.float64]


class _Shelf:
    """The rows of several clients behind each other, on the device."""

    def __init__(self, examples: Sequence[Examples], model: nn.Module) -> None:
        pairs = [tensors(part, model) for part in examples]
        self.x = torch.cat([x for x, _ in pairs])
        self.y = torch.cat([y for _, y in pairs])
        self.sizes = np.array([len(x) for x, _ in pairs])
        starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.offsets = torch.from_numpy(starts).to(self.x.device)
        self._schedule: _Schedule | None = None

    @property
    def num_bytes(self) -> int:
        return self.x.nbytes + self.y.nbytes

    def schedule(self, training: LocalTraining) -> _Schedule:
        """Plan the training on these rows; kept, because it is the same every round."""
        if self._schedule is None:
            self._schedule = _Schedule(self.sizes, training)
        return self._schedule

    def blocks(self, width: int) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Walk over every client's rows: which rows, (num_clients, width), and how many count."""
        for start in range(0, int(self.sizes.max()), width):
            counts = np.clip(self.sizes - start, 0, width)
            places = start + torch.arange(int(counts.max()), device=self.x.device)
            ends = torch.from_numpy(self.sizes).to(self.x.device)
            own = torch.where(places < ends[:, None], places, 0)
            yield self.offsets[:, None] + own, counts


class _Schedule:
    """Which rows every client trains on in each step."""

    def __init__(self, sizes: NDArray[np.int64], training: LocalTraining) -> None:
        self.num_clients = len(sizes)
        self._sizes = sizes
        self._batch_size = training.batch_size
        self._per_pass = np.array([training.batches_per_pass(int(size)) for size in sizes])
        self._steps = np.array([training.num_steps(int(size)) for size in sizes])
        self.num_steps = int(self._steps.max())
        step = np.arange(self.num_steps)[:, None]
        self._pass, batch = np.divmod(step, self._per_pass)
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
        rows = orders[client, number[:, :, None].clamp(max=len(passes) - 1), place]
        return offsets[None, :, None] + torch.where(column < counts[:, :, None], rows, 0)


@dataclass(frozen=True)
class _Batch:
    """One mini-batch of every client."""

    rows: Tensor  # (num_clients, width)
    counts: Tensor  # (num_clients,): how many of them count
    known_counts: NDArray[np.int64]  # the same, without asking the device

    @property
    def has_padding(self) -> bool:
        return bool((self.known_counts != self.rows.shape[1]).any())


class _Part:
    """The lanes that go through the model together."""

    def __init__(
        self, stack: Stack, rows: Tensor, lanes: NDArray[np.intp] | None, counts: NDArray[np.int64]
    ) -> None:
        device = rows.device
        self._whole = stack
        self._chosen = lanes is not None
        all_lanes = np.arange(len(rows)) if lanes is None else lanes
        self.lanes = torch.from_numpy(all_lanes).to(device)
        width = int(counts.max())
        is_even = bool((counts == width).all())
        self.rows = rows[:, :width] if lanes is None else rows[self.lanes, :width]
        self.num_rows = torch.from_numpy(counts).to(device)
        self.counts = None if is_even else self.num_rows
        self.stack = stack
        if lanes is not None:
            self.stack = Stack(
                *({name: t[self.lanes] for name, t in part.items()} for part in stack)
            )

    def outputs(
        self,
        model: StackedModel,
        shelf: _Shelf,
        *,
        train: bool,
        seeds: Tensor | None = None,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run the models on the rows; give outputs and targets."""
        own_seeds = None if seeds is None else seeds[self.lanes]
        x, y = (_selected(part, self.rows) for part in (shelf.x, shelf.y))
        outputs = model.outputs(self.stack, x, train=train, seeds=own_seeds, step=step)
        if self._chosen and train:
            for name, buffer in self.stack.buffers.items():
                self._whole.buffers[name][self.lanes] = buffer
        return outputs, y


def _groups(
    counts: NDArray[np.int64], *, pads: bool, width: int
) -> Iterator[tuple[NDArray[np.intp] | None, NDArray[np.int64]]]:
    """Say which lanes go together, None for all of them, and how many rows each of them has."""
    if pads or bool((counts == width).all()):
        yield None, counts
        return
    for count in np.unique(counts[counts > 0]):
        lanes = np.flatnonzero(counts == count)
        yield lanes, counts[lanes]


class _Lanes:
    """The state of the clients in training, and one step of all of them.

    On a GPU the second step is recorded as a graph, which the others and those of all later
    rounds replay: launching its kernels one by one would take longer than running them. The
    first step of a round differs, because it sets up the optimiser.
    """

    def __init__(
        self, model: StackedModel, training: LocalTraining, *, pads: bool, goes_together: bool
    ) -> None:
        self.model = model
        self.training = training
        self.pads = pads
        self._goes_together = goes_together
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_state: list[dict[str, Tensor]] = []
        self._x: Tensor | None = None

    def load(self, start: Stack, seeds: Tensor) -> None:
        """Begin at these parameters."""
        if self._graph is None:
            for param in start.params.values():
                param.requires_grad_()
            self.stack = start
            self.seeds = seeds
            self.step_number = torch.zeros((), dtype=torch.int64, device=seeds.device)
            self.counts = torch.zeros_like(seeds)
            self.total_loss = torch.zeros(len(seeds), device=seeds.device)
        else:
            with torch.no_grad():
                for ours, new in zip(self.stack, start, strict=True):
                    for name, tensor in ours.items():
                        tensor.copy_(new[name])
                self.seeds.copy_(seeds)
                self.total_loss.zero_()
        self.optimizer = self.training.optimizer(list(self.stack.params.values()))
        self._can_record = seeds.is_cuda and self._goes_together
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = seeds.is_cuda
            elif not isinstance(self.optimizer, torch.optim.SGD):
                self._can_record = False

    def step(self, step: int, shelf: _Shelf, batch: _Batch) -> None:
        """Train every client on one mini-batch."""
        if not self._goes_together:
            self._step_in_groups(step, shelf, batch)
            return
        self.step_number.fill_(step)
        self.counts.copy_(batch.counts)
        if self._x is None or not self._can_record:
            self._x, self._y = (_selected(part, batch.rows) for part in (shelf.x, shelf.y))
        else:
            _select_into(self._x, shelf.x, batch.rows)
            _select_into(self._y, shelf.y, batch.rows)
        if not self._can_record or step == 0:
            self._step_together(has_padding=self.pads and batch.has_padding)
            return
        if step == 1:
            self._bring_optimizer()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step_together(has_padding=self.pads)
            self._graph_state = self._optimizer_state()
        self._graph.replay()

    def _step_together(self, *, has_padding: bool) -> None:
        assert self._x is not None
        outputs = self.model.outputs(
            self.stack, self._x, train=True, seeds=self.seeds, step=self.step_number
        )
        counts = self.counts if has_padding else None
        losses = self.model.means(self.training.loss, outputs, self._y, counts)
        self._descend(losses, self.counts)

    def _step_in_groups(self, step: int, shelf: _Shelf, batch: _Batch) -> None:
        losses = torch.zeros_like(self.total_loss)
        width = batch.rows.shape[1]
        for lanes, own_counts in _groups(batch.known_counts, pads=self.pads, width=width):
            part = _Part(self.stack, batch.rows, lanes, own_counts)
            outputs, y = part.outputs(self.model, shelf, train=True, seeds=self.seeds, step=step)
            means = self.model.means(self.training.loss, outputs, y, part.counts)
            losses = losses.index_add(0, part.lanes, means.to(losses.dtype))
        self._descend(losses, batch.counts)

    def _descend(self, losses: Tensor, num_rows: Tensor) -> None:
        params = list(self.stack.params.values())
        gradients = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        self.optimizer.step()
        self.total_loss += losses.detach() * num_rows

    def _bring_optimizer(self) -> None:
        """Bring what the first step of this round set up to where the graph works."""
        for kept, new in zip(self._graph_state, self._optimizer_state(), strict=False):
            for name, tensor in kept.items():
                if tensor is not new[name]:
                    tensor.copy_(new[name])

    def _optimizer_state(self) -> list[dict[str, Tensor]]:
        return [
            {n: v for n, v in self.optimizer.state[param].items() if isinstance(v, Tensor)}
            for param in self.stack.params.values()
        ]


def _select_into(target: Tensor, shelf: Tensor, rows: Tensor) -> None:
    flat = target.view(-1, *shelf.shape[1:])
    torch.index_select(shelf, 0, rows.reshape(-1), out=flat)


def _selected(shelf: Tensor, rows: Tensor) -> Tensor:
    """Take rows: shape (num_lanes, num_rows, ...)."""
    taken = shelf.index_select(0, rows.reshape(-1))
    return taken.reshape(*rows.shape, *shelf.shape[1:])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _to_server(matrix: Tensor) -> Array:
    """Hand numbers over: on the CPU as NumPy's, on a GPU where they are."""
    return matrix if matrix.device.type == "cuda" else matrix.numpy()  # type: ignore[return-value]


def _check_shapes(clients: Mapping[str, ClientData]) -> None:
    for part in ("train", "test"):
        kinds = {
            tuple((array.dtype.str, array.shape[1:]) for array in examples)
            for client in clients.values()
            if (examples := getattr(client, part)) is not None
        }
        if len(kinds) > 1:
            raise CannotStack(f"the clients' {part} examples differ in shape or type")
