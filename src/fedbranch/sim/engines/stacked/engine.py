"""The vectorised engine: all clients of a round, at whatever leaf, as one stack of models.

A client needs one model in the stack, or two when it trains on halves, or one for each trial.
If the model treats every example by itself, smaller batches are padded with examples that do
not count. If it does not, as with BatchNorm, only batches of equal size go together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import ClientData, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, UpdateBatch
from fedbranch.sim.engines.reference import Reference
from fedbranch.sim.engines.stacked.chunks import (
    CPU_CHUNK_BYTES,
    Chunking,
    example_bytes,
    gpu_memory_share,
    in_turn,
)
from fedbranch.sim.engines.stacked.comparison import example_sample, stack_model
from fedbranch.sim.engines.stacked.example_store import ExampleStore
from fedbranch.sim.engines.stacked.measuring import measure_models
from fedbranch.sim.engines.stacked.requirements import check_shapes, has_ignored_targets
from fedbranch.sim.engines.stacked.training import StackedTraining, Trained
from fedbranch.training.half_split import Halves, half_rows, halves_seed, training_seeds
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.training.precision import products_in
from fedbranch.tree import Node
from fedbranch.types import Array

__all__ = ["StackedEngine"]

Result = TypeVar("Result")

CPU_KEPT_BYTES = 2**28  # of examples that are kept from round to round


class StackedEngine:
    """Trains many clients at once; see :class:`fedbranch.sim.engines.engine.Engine`.

    Parameters
    ----------
    model, initial, clients, training, seed
        As for every engine.
    cpu_chunk_bytes
        What the models that train together may take in memory, on the CPU.

    Attributes
    ----------
    model
        The stacked model.

    Raises
    ------
    CannotStack
        If the model, its training or the clients' data do not allow a stack.
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
        cpu_chunk_bytes: float = CPU_CHUNK_BYTES,
    ) -> None:
        self._initial = initial
        self._training = training
        self._device = initial.params.device
        self._clients = clients
        self._seed = seed
        self._reference = Reference(model, initial, clients, training, seed=seed)
        check_shapes(clients)
        x, y = example_sample(clients, model)
        # In full precision: what TF32 rounds away would look like another result.
        with products_in("float32", self._device):
            self.model = stack_model(model, training, x, y)
        if has_ignored_targets(clients):
            self.model.can_pad_training = self.model.can_pad_measuring = False
        is_cuda = self._device.type == "cuda"
        self._chunking = Chunking(
            training,
            initial.params.numel(),
            example_bytes(model, training, x, y),
            gpu_memory_share(self._device) if is_cuda else cpu_chunk_bytes,
        )
        kept_bytes = gpu_memory_share(self._device) if is_cuda else CPU_KEPT_BYTES
        self.examples = ExampleStore(clients, model, kept_bytes)
        self._stacked_training = StackedTraining(self.model, initial)

    def updates(self, tasks: Mapping[str, Task], seeds: Mapping[str, int]) -> UpdateBatch:
        """Train every client that has a task."""
        sizes = {i: len(self._clients[i].train.x) for i in tasks}
        halves: dict[str, Halves] = {}
        for client_id, task in tasks.items():
            own = None if task.halves is None else self._halves(client_id, task.halves)
            if own is not None:
                halves[client_id] = own
        whole = {i: size for i, size in sizes.items() if i not in halves}
        on_halves = {i: len(both.second_rows) for i, both in halves.items()}
        chunks, parts = [], []
        for chunk, trained in self._in_turn(
            [
                *self._chunking.for_training(whole),
                *self._chunking.for_training(on_halves, on_halves=True),
            ],
            lambda chunk: self._train(chunk, tasks, seeds, halves),
            lambda client_id: self._reference.updates({client_id: tasks[client_id]}, seeds),
        ):
            chunks.append(chunk)
            parts.append(trained)
        self.examples.keep_only("training", chunks)
        ordered = [client_id for chunk in chunks for client_id in chunk]
        signals = [part.signals for part in parts if part.signals is not None]
        half_differences = [part.half_differences_or_zeros for part in parts] if halves else []
        return UpdateBatch(
            client_ids=ordered,
            vectors=_joined([part.vectors for part in parts]),
            num_examples=[sizes[i] for i in ordered],
            bases=[tasks[i].base for i in ordered],
            metrics=[{"loss": loss} for part in parts for loss in part.losses.tolist()],
            buffers=_joined([part.buffers for part in parts]),
            signals=_joined(signals) if signals else None,
            half_differences=_joined(half_differences) if half_differences else None,
        )

    def _train(
        self,
        ids: Sequence[str],
        tasks: Mapping[str, Task],
        seeds: Mapping[str, int],
        halves: Mapping[str, Halves],
    ) -> Trained:
        """Train clients, all of them on all examples or all of them on halves."""
        examples = self.examples.examples(ids, "train", "training")
        own_tasks = [tasks[i] for i in ids]
        if ids[0] not in halves:
            return self._stacked_training.train(
                examples, examples.schedule(self._training), own_tasks, [seeds[i] for i in ids]
            )
        first_rows, second_rows = zip(*(halves[i] for i in ids), strict=True)
        first_seeds, second_seeds = zip(*(training_seeds(seeds[i]) for i in ids), strict=True)
        on_halves = examples.select([*enumerate(first_rows), *enumerate(second_rows)])
        return self._stacked_training.train(
            on_halves,
            on_halves.schedule(self._training.on_a_half),
            own_tasks * 2,
            [*first_seeds, *second_seeds],
        ).joined_halves()

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        able: dict[str, list[_TrialExamples]] = {}
        for client_id, own in trials.items():
            found = [self._trial_examples(client_id, trial) for trial in own]
            if None not in found:
                able[client_id] = [one for one in found if one is not None]
        losses = {client_id: [math.nan] * len(own) for client_id, own in able.items()}
        for part in ("held_out", "train"):
            numbers = {
                i: [n for n, one in enumerate(own) if one.part == part] for i, own in able.items()
            }
            asked = {i: [able[i][n] for n in own] for i, own in numbers.items() if own}
            for client_id, on_part in self._losses_on(part, asked).items():
                for number, loss in zip(numbers[client_id], on_part, strict=True):
                    losses[client_id][number] = loss
        return {client_id: tuple(own) for client_id, own in losses.items()}

    def _losses_on(
        self, part: PartName, asked: Mapping[str, Sequence[_TrialExamples]]
    ) -> dict[str, list[float]]:
        """Measure all trials of many clients at once, on one part of their data."""
        purpose = f"trying {part}"
        chunks = list(
            self._chunking.for_measuring(
                {i: max(len(one.rows) for one in own) for i, own in asked.items()},
                models_per_client=max(map(len, asked.values()), default=1),
            )
        )
        self.examples.keep_only(purpose, chunks)

        def measure(chunk: list[str]) -> NDArray[np.float64]:
            tried = [(number, one) for number, i in enumerate(chunk) for one in asked[i]]
            examples = self.examples.examples(chunk, part, purpose).select(
                [(number, one.rows) for number, one in tried]
            )
            trials = [one.trial for _, one in tried]
            measures = {"loss": self._training.loss}
            return measure_models(self.model, self._initial, trials, examples, measures)["loss"]

        losses: dict[str, list[float]] = {}
        for chunk, values in self._in_turn(
            chunks,
            measure,
            lambda i: self._reference.losses({i: [one.trial for one in asked[i]]}),
        ):
            in_order = iter(values.tolist())
            losses |= {i: [next(in_order) for _ in asked[i]] for i in chunk}
        return losses

    def _trial_examples(self, client_id: str, trial: Trial) -> _TrialExamples | None:
        """Find the examples that a trial is measured on; None if the client lacks them."""
        if trial.on == "held-out":
            held_out = self._clients[client_id].held_out
            if held_out is None:
                return None
            return _TrialExamples(trial, "held_out", np.arange(len(held_out.x)))
        assert trial.halves is not None
        halves = self._halves(client_id, trial.halves)
        if halves is None:
            return None
        rows = halves.first_rows if trial.on == "first half" else halves.second_rows
        return _TrialExamples(trial, "train", rows)

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on a part of their data, each under the model of a node."""
        sizes = {
            i: len(examples.x)
            for i in at
            if (examples := getattr(self._clients[i], part)) is not None
        }
        measured: dict[str, dict[str, float]] = {}
        chunks = list(self._chunking.for_measuring(sizes))
        purpose = f"measuring {part}"
        self.examples.keep_only(purpose, chunks)
        for chunk, values in self._in_turn(
            chunks,
            lambda chunk: measure_models(
                self.model,
                self._initial,
                [at[i] for i in chunk],
                self.examples.examples(chunk, part, purpose),
                self._training.measures,
            ),
            lambda client_id: self._reference.measure({client_id: at[client_id]}, part),
        ):
            for row, client_id in enumerate(chunk):
                measured[client_id] = {name: float(v[row]) for name, v in values.items()}
        return measured

    def close(self) -> None:
        """Return at once: there are no processes to end."""

    def _halves(self, client_id: str, number: int) -> Halves | None:
        own_seed = halves_seed(self._seed, client_id)
        return half_rows(len(self._clients[client_id].train.x), own_seed, number)

    def _in_turn(
        self,
        chunks: Iterable[list[str]],
        together: Callable[[list[str]], Result],
        alone: Callable[[str], object],
    ) -> Iterator[tuple[list[str], Result]]:
        """Work through chunks; after an error try each client alone, to name the one that fails."""

        def work(chunk: list[str]) -> Result:
            try:
                with products_in(self._training.precision, self._device):
                    return together(chunk)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                for client_id in chunk:
                    alone(client_id)  # raises with the client's name, if this client fails alone
                raise ClientFailed(
                    f"{len(chunk)} clients could not be trained or measured as one stack: {error}; "
                    "take engine='reference'"
                ) from error

        return in_turn(chunks, work, self._free_memory)

    def _free_memory(self) -> None:
        self._stacked_training.forget()
        self.examples.clear()
        torch.cuda.empty_cache()


class _TrialExamples(NamedTuple):
    trial: Trial
    part: PartName
    rows: NDArray[np.intp]  # of that part of the client's data


def _joined(parts: Sequence[Tensor]) -> Array:
    """Join matrices for the server: NumPy's on the CPU; on a GPU they stay there."""
    matrix = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return matrix if matrix.device.type == "cuda" else matrix.numpy()  # type: ignore[return-value]  # a tensor is an array of its own library
