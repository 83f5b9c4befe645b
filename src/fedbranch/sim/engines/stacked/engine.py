"""The vectorised engine: all clients of a round, whatever their leaf, as one stack of models.

Clients of several sizes train together. Where the model treats every row by itself, a batch
is padded with the client's own first row, which does not count; where it does not
(BatchNorm), only batches of the same size go together. A client that is done is set aside:
what its row goes on computing is nobody's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import ClientData, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, UpdateBatch
from fedbranch.sim.engines.reference import Place, Reference, memory_of
from fedbranch.sim.engines.stacked.batches import Batch, Schedule, Shelf, groups
from fedbranch.sim.engines.stacked.model import IGNORED_TARGET, CannotStack, Stack, StackedModel
from fedbranch.sim.engines.stacked.step import Lanes, Part
from fedbranch.training.client import EVALUATION_BATCH_SIZE, products_in, tensors
from fedbranch.training.half_split import Halves, half_rows, halves_seed, training_seeds
from fedbranch.training.local_training import LocalTraining, Measure
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node
from fedbranch.types import Array

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
    """Trains and measures many clients at once; see :class:`fedbranch.sim.engines.choice.Engine`.

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
        *,
        seed: int = 0,
    ) -> None:
        self.initial = initial
        self.training = training
        self.device = initial.params.device
        self._model = model
        self._clients = clients
        self._seed = seed
        self._reference = Reference(model, initial, clients, training, seed=seed)
        _check_shapes(clients)
        x, y = _tried_rows(clients, model)
        # In full precision: what TF32 rounds away would look like another result.
        with products_in("float32", self.device):
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
        sizes = {i: len(self._clients[i].train.x) for i in tasks}
        halves: dict[str, Halves] = {}
        for client_id, task in tasks.items():
            own = None if task.halves is None else self._halves(client_id, task.halves)
            if own is not None:
                halves[client_id] = own
        whole = [client_id for client_id in tasks if client_id not in halves]
        chunks, parts = [], []
        for chunk, trained in self._in_turn(
            [
                *self._training_chunks({i: sizes[i] for i in whole}),
                *self._training_chunks(
                    {i: len(both.second_rows) for i, both in halves.items()}, lanes_per_client=2
                ),
            ],
            lambda chunk: self._train(chunk, tasks, seeds, halves),
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
            half_differences=_to_server(_joined([part.half_differences_or_zeros for part in parts]))
            if halves
            else None,
        )

    def _train(
        self,
        ids: Sequence[str],
        tasks: Mapping[str, Task],
        seeds: Mapping[str, int],
        halves: Mapping[str, Halves],
    ) -> _Trained:
        """Train clients on all of their rows, or all of them on their halves."""
        shelf = self._shelf(ids, "train", "training")
        if ids[0] not in halves:
            schedule = shelf.schedule(self.training)
            return self._train_on(shelf, schedule, [tasks[i] for i in ids], [seeds[i] for i in ids])
        both = list(zip(*(halves[i] for i in ids), strict=True))  # the first ones, the second ones
        own_seeds = list(zip(*(training_seeds(seeds[i]) for i in ids), strict=True))
        on_halves = shelf.parts([pair for rows in both for pair in enumerate(rows)])
        lanes = self._train_on(
            on_halves,
            on_halves.schedule(self.training.on_a_half),
            [tasks[i] for i in ids] * 2,
            [*own_seeds[0], *own_seeds[1]],
        )
        return lanes.of_both_halves()

    def _train_on(
        self, shelf: Shelf, schedule: Schedule, places: Sequence[Place], seeds: Sequence[int]
    ) -> _Trained:
        """Train one model at each place, on its own rows of the shelf."""
        before, before_buffers = self._states(places)
        start = self.stacked.stack(before, before_buffers)
        if self.stacked.precision != before.dtype or start.buffers:
            # As the model's own precision holds them.
            before = StackedModel.flat(start.params, before)
            before_buffers = StackedModel.flat(start.buffers, before_buffers)
        seed = torch.tensor(seeds, device=self.device)
        signals = self._gradients(start, shelf) if self.training.send_gradient else None
        lanes = self._lanes_for(schedule)
        lanes.load(start, seed)
        after, after_buffers = torch.empty(before.shape), torch.empty(before_buffers.shape)
        if not schedule.ends_together:
            after = torch.empty(before.shape, dtype=before.dtype, device=self.device)
            after_buffers = torch.empty(
                before_buffers.shape, dtype=before_buffers.dtype, device=self.device
            )
        rows_of_step = shelf.places(schedule.rows(seed, shelf.offsets))
        counts_of_step = torch.from_numpy(schedule.counts).to(self.device)
        for step in range(schedule.num_steps):
            batch = Batch(rows_of_step[step], counts_of_step[step], schedule.counts[step])
            lanes.step(step, shelf, batch)
            done = schedule.finishing(step)
            if len(done) == len(places):
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
            total_losses=lanes.total_loss.double().cpu().numpy(),
            num_visits=schedule.counts.sum(axis=0),
        )

    def _halves(self, client_id: str, number: int) -> Halves | None:
        own_seed = halves_seed(self._seed, client_id)
        return half_rows(len(self._clients[client_id].train.x), own_seed, number)

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

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on their data, each under the model of a node."""
        sizes = {
            i: len(examples.x)
            for i in at
            if (examples := getattr(self._clients[i], part)) is not None
        }
        measured: dict[str, dict[str, float]] = {}
        chunks = list(self._measuring_chunks(sizes))
        purpose = f"measuring {part}"
        self._forget_shelves(purpose, but=chunks)
        for chunk, values in self._in_turn(
            chunks,
            lambda chunk: self._measure_on(
                self._shelf(chunk, part, purpose), [at[i] for i in chunk], self.training.measures
            ),
            lambda client_id: self._reference.measure({client_id: at[client_id]}, part),
        ):
            for row, client_id in enumerate(chunk):
                measured[client_id] = {name: float(v[row]) for name, v in values.items()}
        return measured

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        able: dict[str, list[_Tried]] = {}
        for client_id, own in trials.items():
            tried = [self._tried(client_id, trial) for trial in own]
            if None not in tried:
                able[client_id] = [one for one in tried if one is not None]
        found = {client_id: [math.nan] * len(own) for client_id, own in able.items()}
        for part in ("held_out", "train"):
            positions = {
                i: [p for p, one in enumerate(own) if one.part == part] for i, own in able.items()
            }
            asked = {i: [able[i][p] for p in own] for i, own in positions.items() if own}
            for client_id, losses in self._losses_on(part, asked).items():
                for position, loss in zip(positions[client_id], losses, strict=True):
                    found[client_id][position] = loss
        return {client_id: tuple(losses) for client_id, losses in found.items()}

    def _losses_on(
        self, part: PartName, asked: Mapping[str, Sequence[_Tried]]
    ) -> dict[str, list[float]]:
        """Try all models of many clients at once, on one part of their data."""
        purpose = f"trying {part}"
        chunks = list(
            self._measuring_chunks(
                {i: max(len(one.rows) for one in own) for i, own in asked.items()},
                lanes_per_client=max(map(len, asked.values()), default=1),
            )
        )
        self._forget_shelves(purpose, but=chunks)

        def together(chunk: list[str]) -> NDArray[np.float64]:
            lanes = [(position, one) for position, i in enumerate(chunk) for one in asked[i]]
            shelf = self._shelf(chunk, part, purpose).parts([(p, one.rows) for p, one in lanes])
            places = [one.trial for _, one in lanes]
            return self._measure_on(shelf, places, {"loss": self.training.loss})["loss"]

        losses: dict[str, list[float]] = {}
        for chunk, values in self._in_turn(
            chunks,
            together,
            lambda i: self._reference.losses({i: [one.trial for one in asked[i]]}),
        ):
            in_order = iter(values.tolist())
            losses |= {i: [next(in_order) for _ in asked[i]] for i in chunk}
        return losses

    def _tried(self, client_id: str, trial: Trial) -> _Tried | None:
        """Find the rows that a trial is about, if the client has them."""
        if trial.on == "held-out":
            held_out = self._clients[client_id].held_out
            if held_out is None:
                return None
            return _Tried(trial, "held_out", np.arange(len(held_out.x)))
        assert trial.halves is not None
        halves = self._halves(client_id, trial.halves)
        if halves is None:
            return None
        rows = halves.first_rows if trial.on == "first half" else halves.second_rows
        return _Tried(trial, "train", rows)

    @torch.no_grad()
    def _measure_on(
        self, shelf: Shelf, places: Sequence[Place], measures: Mapping[str, Measure]
    ) -> dict[str, NDArray[np.float64]]:
        """Measure the model at each place on its own rows of the shelf."""
        stack = self.stacked.stack(*self._states(places))
        can_pad = self._pads_measures
        totals = {
            name: torch.zeros(len(places), dtype=torch.float64, device=self.device)
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

    def _states(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        """Give the parameters and buffers at nodes, one row for each place."""
        number: dict[int, int] = {}
        number_at: dict[tuple[int, int], int] = {}
        unique: list[Place] = []
        for place in places:
            if id(place) not in number:
                number[id(place)] = number_at.setdefault(memory_of(place), len(unique))
                if len(number_at) > len(unique):
                    unique.append(place)
        chosen = torch.tensor([number[id(place)] for place in places], device=self.device)
        flat = []
        for name in ("params", "buffers"):
            moved = torch.from_numpy(np.stack([getattr(place, name) for place in unique]))
            states = getattr(self.initial, name) + moved.to(self.device)
            is_one = len(unique) == 1
            flat.append(states.expand(len(places), -1) if is_one else states[chosen])
        return flat[0], flat[1]

    def _shelf(self, ids: Sequence[str], part: PartName, purpose: str) -> Shelf:
        """Lay the rows of clients behind each other; kept while the same are asked for."""
        key = (purpose, *ids)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = Shelf.of([getattr(self._clients[i], part) for i in ids], self._model)
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

    def _training_chunks(
        self, sizes: Mapping[str, int], *, lanes_per_client: int = 1
    ) -> Iterator[list[str]]:
        """Cut clients, with the number of rows of each lane, into chunks for training."""
        if not sizes:
            return iter(())
        training, steps = self.training, self._num_steps
        if lanes_per_client > 1:
            training = self.training.on_a_half
            steps = {i: training.num_steps(size) for i, size in sizes.items()}
        width = self.training.batch_size + 1
        longest, most_steps = max(sizes.values()), max(steps[i] for i in sizes)
        num_passes = training.epochs or -(
            -most_steps // training.batches_per_pass(min(sizes.values()))
        )
        per_lane = 4 * 6 * self.initial.params.numel()  # and gradients, optimiser state, results
        per_lane += min(width, longest) * self._row_bytes
        per_lane += 8 * (num_passes * longest + most_steps * width)  # the order of its rows
        return self._chunks(sizes, steps, lanes_per_client * per_lane)

    def _measuring_chunks(
        self, sizes: Mapping[str, int], *, lanes_per_client: int = 1
    ) -> Iterator[list[str]]:
        """Cut clients, with the number of rows of each lane, into chunks for measuring."""
        longest = max(sizes.values(), default=1)
        per_lane = 4 * 2 * self.initial.params.numel()
        per_lane += min(EVALUATION_BATCH_SIZE, longest) * self._row_bytes
        return self._chunks(sizes, sizes, lanes_per_client * per_lane)

    def _chunks(
        self, ids: Iterable[str], length: Mapping[str, int], per_client: int
    ) -> Iterator[list[str]]:
        """Cut clients into chunks of similar length that fit into memory."""
        budget = self._memory if self.device.type == "cuda" else CPU_CHUNK_BYTES
        largest = max(1, int(budget / per_client))
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
    total_losses: NDArray[np.float64]
    num_visits: NDArray[np.int64]
    half_differences: Tensor | None = None

    @property
    def losses(self) -> NDArray[np.float64]:
        """The mean loss of the examples as they were visited."""
        return self.total_losses / self.num_visits

    @property
    def half_differences_or_zeros(self) -> Tensor:
        """One row for each client, also if they were trained on all of their rows."""
        if self.half_differences is None:
            return torch.zeros_like(self.vectors)
        return self.half_differences

    def of_both_halves(self) -> _Trained:
        """Join the first halves, which come first, with the second ones."""
        num_clients = len(self.vectors) // 2
        first, second = slice(num_clients), slice(num_clients, None)

        def mean(rows: Tensor) -> Tensor:
            return (rows[first] + rows[second]) / 2

        compared = self.vectors if self.signals is None else self.signals
        return _Trained(
            vectors=mean(self.vectors),
            buffers=mean(self.buffers),
            signals=None if self.signals is None else mean(self.signals),
            total_losses=self.total_losses[first] + self.total_losses[second],
            num_visits=self.num_visits[first] + self.num_visits[second],
            half_differences=(compared[first] - compared[second]) / 2,
        )


class _Tried(NamedTuple):
    trial: Trial
    part: PartName
    rows: NDArray[np.intp]  # of that part of the client's data


def _has_ignored_targets(clients: Mapping[str, ClientData]) -> bool:
    return any(
        np.issubdtype(part.y.dtype, np.integer) and bool((part.y == IGNORED_TARGET).any())
        for client in clients.values()
        for part in (client.train, client.test, client.validation)
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
    for part in ("train", "test", "validation", "held_out"):
        kinds = {
            tuple((array.dtype.str, array.shape[1:]) for array in examples)
            for client in clients.values()
            if (examples := getattr(client, part)) is not None
        }
        if len(kinds) > 1:
            raise CannotStack(f"the clients' {part} examples differ in shape or type")
