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
from fedbranch.data import ClientData
from fedbranch.errors import ClientFailed
from fedbranch.messages import Task, UpdateBatch
from fedbranch.sim.lanes import Lanes, Part
from fedbranch.sim.reference import Reference
from fedbranch.sim.rows import Batch, Schedule, Shelf, groups
from fedbranch.sim.stacked_model import IGNORED_TARGET, CannotStack, Stack, StackedModel
from fedbranch.tree import Node

__all__ = ["Vectorised"]

Result = TypeVar("Result")

# What a chunk of clients may take in memory. The larger, the less overhead per client.
CPU_CHUNK_BYTES = 2**29
GPU_MEMORY_SHARE = 0.2
KEPT_LANES = 3
TRIED_CLIENTS = 8
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
        x, y = _tried_rows(clients, model)
        with products_in(training.precision, self.device):
            self.stacked = StackedModel(model, training, x, y)
        is_ignoring = _has_ignored_targets(clients)
        self.pads = self.stacked.can_pad_training and not is_ignoring
        self._pads_measures = self.stacked.can_pad_measuring and not is_ignoring
        self._row_bytes = self._measured_row_bytes(x, y)
        self._num_steps = {i: training.num_steps(len(c.train.x)) for i, c in clients.items()}
        self._shelves: dict[tuple[str, ...], Shelf] = {}
        self._lanes: dict[tuple[object, ...], Lanes] = {}

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
            batch = Batch(rows_of_step[step], counts_of_step[step], schedule.counts[step])
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

    def _gradients(self, stack: Stack, shelf: Shelf) -> Tensor:
        """Give the negative gradients of the mean loss over all of every client's rows."""
        params = {name: p.detach().requires_grad_() for name, p in stack.params.items()}
        total = [torch.zeros_like(param) for param in params.values()]
        for rows, counts in shelf.blocks(EVALUATION_BATCH_SIZE):
            share = torch.from_numpy(counts / shelf.sizes).to(self.device, torch.float32)
            losses = torch.zeros(len(counts), device=self.device)
            can_pad = self._pads_measures
            for lanes, own_counts in groups(counts, pads=can_pad, width=rows.shape[1]):
                part = Part(Stack(params, stack.buffers), rows, lanes, own_counts)
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
        can_pad = self._pads_measures
        totals = {
            name: torch.zeros(len(ids), dtype=torch.float64, device=self.device)
            for name in measures
        }
        for rows, counts in shelf.blocks(EVALUATION_BATCH_SIZE):
            for lanes, own_counts in groups(counts, pads=can_pad, width=rows.shape[1]):
                group = Part(stack, rows, lanes, own_counts)
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

    def _shelf(self, ids: Sequence[str], part: Literal["train", "test"], purpose: str) -> Shelf:
        """Lay the rows of clients behind each other; kept while the same are asked for."""
        key = (purpose, *ids)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = Shelf([getattr(self._clients[i], part) for i in ids], self._model)
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
        longest = max(sizes.values(), default=1)
        per_client = 4 * copies * self.initial.params.numel()
        per_client += min(width, longest) * self._row_bytes
        if for_training:  # and the order of its rows, in every pass
            num_steps = max(self._num_steps[i] for i in ids)
            shortest = min(sizes.values())
            num_passes = self.training.epochs or -(
                -num_steps // self.training.batches_per_pass(shortest)
            )
            per_client += 8 * (num_passes * longest + num_steps * width)
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

    def _lanes_for(self, schedule: Schedule) -> Lanes:
        shape = (schedule.num_clients, schedule.width, schedule.is_even)
        if shape not in self._lanes:
            if len(self._lanes) == KEPT_LANES:  # or memory would not be bounded
                self._lanes.pop(next(iter(self._lanes)))
            self._lanes[shape] = Lanes(
                self.stacked,
                self.training,
                pads=self.pads and not schedule.is_even,
                goes_together=self.pads or schedule.is_even,
            )
        return self._lanes[shape]

    def _measured_row_bytes(self, x: Tensor, y: Tensor) -> int:
        """Measure what the model remembers of one row for its gradient."""
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
            self.training.loss(model(x.clone()), y)
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


def _has_ignored_targets(clients: Mapping[str, ClientData]) -> bool:
    return any(
        np.issubdtype(part.y.dtype, np.integer) and bool((part.y == IGNORED_TARGET).any())
        for client in clients.values()
        for part in (client.train, client.test)
        if part is not None
    )


def _tried_rows(clients: Mapping[str, ClientData], model: nn.Module) -> tuple[Tensor, Tensor]:
    """Take the first and last rows of several clients, floating ones with a little noise.

    Equal rows, or rows of one class, would not show what a model or a loss does with
    different ones.
    """
    examples = [client.train for client in clients.values()]
    chosen = examples[:: -(-len(examples) // TRIED_CLIENTS)]
    pairs = [tensors(part, model) for part in chosen]
    x, y = (torch.cat([torch.cat([p[i][:2], p[i][-2:]]) for p in pairs]) for i in range(2))
    if x.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
        spread = x.double().nan_to_num().std().clamp(min=0.1)
        x = x + (0.1 * spread * noise.to(x.device)).to(x.dtype)
    return x, y


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
