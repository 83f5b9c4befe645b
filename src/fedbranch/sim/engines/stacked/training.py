"""Training many models at once, each on its own examples, from its own parameters.

Models with different numbers of examples train together. A model that is done stays in the
stack: its numbers are saved after its last step, and what its rows compute later is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbranch.sim.engines.model_source import ModelSource
from fedbranch.sim.engines.stacked.batches import Batch, Schedule, StackedExamples
from fedbranch.sim.engines.stacked.groups import model_groups
from fedbranch.sim.engines.stacked.model import StackedModel
from fedbranch.sim.engines.stacked.state import StackedState, flat_states, flatten
from fedbranch.sim.engines.stacked.step import TrainingStep
from fedbranch.training.client import EVALUATION_BATCH_SIZE
from fedbranch.training.model_state import ModelState

__all__ = ["StackedTraining", "Trained"]

KEPT_STEPS = 3


@dataclass(frozen=True)
class Trained:
    """What training gave, one row for each model.

    Attributes
    ----------
    vectors, buffers
        After minus before.
    signals
        Negative gradients, if the training sends them.
    total_losses, num_visits
        The sum of the losses over all visits to examples, and the number of visits.
    half_differences
        Only after :meth:`joined_halves`.
    """

    vectors: Tensor
    buffers: Tensor
    signals: Tensor | None
    total_losses: NDArray[np.float64]
    num_visits: NDArray[np.int64]
    half_differences: Tensor | None = None

    @property
    def losses(self) -> NDArray[np.float64]:
        """The mean loss over all visits to examples."""
        return self.total_losses / self.num_visits

    @property
    def half_differences_or_zeros(self) -> Tensor:
        """One row for each model; zeros for models that trained on all examples."""
        if self.half_differences is None:
            return torch.zeros_like(self.vectors)
        return self.half_differences

    def joined_halves(self) -> Trained:
        """Join two models of each client: all first halves come first, then all second halves."""
        num_clients = len(self.vectors) // 2
        first, second = slice(num_clients), slice(num_clients, None)

        def mean(rows: Tensor) -> Tensor:
            return (rows[first] + rows[second]) / 2

        compared = self.vectors if self.signals is None else self.signals
        return Trained(
            vectors=mean(self.vectors),
            buffers=mean(self.buffers),
            signals=None if self.signals is None else mean(self.signals),
            total_losses=self.total_losses[first] + self.total_losses[second],
            num_visits=self.num_visits[first] + self.num_visits[second],
            half_differences=(compared[first] - compared[second]) / 2,
        )


class StackedTraining:
    """Trains stacks of models round after round.

    Parameters
    ----------
    model
        The stacked model.
    initial
        The initial model θ0.
    """

    def __init__(self, model: StackedModel, initial: ModelState) -> None:
        self._model = model
        self._initial = initial
        self._device = initial.params.device
        self._steps: dict[tuple[object, ...], TrainingStep] = {}

    def train(
        self,
        examples: StackedExamples,
        schedule: Schedule,
        sources: Sequence[ModelSource],
        seeds: Sequence[int],
    ) -> Trained:
        """Train one model from each source, on its own examples.

        Parameters
        ----------
        examples, schedule
            The models' examples, and when they train on which.
        sources, seeds
            Where each model starts, and its seed.
        """
        before, before_buffers = flat_states(self._initial, sources)
        start = self._model.state(before, before_buffers)
        if self._model.precision != before.dtype or start.buffers:
            # Rounded to the model's own precision.
            before = flatten(start.params, before)
            before_buffers = flatten(start.buffers, before_buffers)
        seed = torch.tensor(seeds, device=self._device)
        sends_signals = self._model.training.send_gradient
        signals = self._negative_gradients(start, examples) if sends_signals else None
        step = self._step_for(schedule)
        step.load(start, seed)
        after, after_buffers = self._steps_of(
            step, examples, schedule, seed, before, before_buffers
        )
        # An infinity or NaN that did not change has moved by 0; subtraction would give NaN.
        moved = (after_buffers != before_buffers) & ~(
            after_buffers.isnan() & before_buffers.isnan()
        )
        return Trained(
            vectors=(after - before).float(),
            buffers=torch.where(moved, after_buffers - before_buffers, 0.0).float(),
            signals=signals,
            total_losses=step.total_loss.double().cpu().numpy(),
            num_visits=schedule.counts.sum(axis=0),
        )

    def forget(self) -> None:
        """Free the memory of earlier training."""
        self._steps.clear()

    def _steps_of(
        self,
        step: TrainingStep,
        examples: StackedExamples,
        schedule: Schedule,
        seed: Tensor,
        before: Tensor,
        before_buffers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Take all steps; return every model's numbers after its own last step."""
        after, after_buffers = torch.empty(before.shape), torch.empty(before_buffers.shape)
        if not schedule.ends_together:
            after = torch.empty(before.shape, dtype=before.dtype, device=self._device)
            after_buffers = torch.empty(
                before_buffers.shape, dtype=before_buffers.dtype, device=self._device
            )
        rows = examples.rows(schedule.indices(seed, examples.offsets))
        counts = torch.from_numpy(schedule.counts).to(self._device)
        for number in range(schedule.num_steps):
            step.run(number, examples, Batch(rows[number], counts[number], schedule.counts[number]))
            done = schedule.finishing(number)
            if len(done) == schedule.num_models:
                after = flatten(step.state.params, before)
                after_buffers = flatten(step.state.buffers, before_buffers)
            elif len(done):
                models = torch.from_numpy(done).to(self._device)
                now = step.state.of_models(models)
                after[models] = flatten(now.params, before[models])
                after_buffers[models] = flatten(now.buffers, before_buffers[models])
        return after, after_buffers

    def _step_for(self, schedule: Schedule) -> TrainingStep:
        shape = (schedule.num_models, schedule.width, schedule.is_even)
        if shape not in self._steps:
            if len(self._steps) == KEPT_STEPS:  # or memory would not be bounded
                self._steps.pop(next(iter(self._steps)))
            self._steps[shape] = TrainingStep(
                self._model, self._model.training, is_even=schedule.is_even
            )
        return self._steps[shape]

    def _negative_gradients(self, state: StackedState, examples: StackedExamples) -> Tensor:
        """Compute minus the gradient of the mean loss over all of each model's examples."""
        params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
        total = [torch.zeros_like(param) for param in params.values()]
        loss, can_pad = self._model.training.loss, self._model.can_pad_measuring
        for rows, counts in examples.batches(EVALUATION_BATCH_SIZE):
            share = torch.from_numpy(counts / examples.sizes).to(self._device, torch.float32)
            losses = torch.zeros(len(counts), device=self._device)
            whole = StackedState(params, state.buffers)
            for group in model_groups(whole, rows, counts, can_pad=can_pad):
                outputs, y = group.outputs(self._model, examples, train=False)
                means = group.means(self._model, loss, outputs, y)
                losses = losses.index_add(0, group.models, means.to(losses.dtype))
            found = torch.autograd.grad(
                (losses * share).sum(), list(params.values()), allow_unused=True
            )
            for sum_, gradient in zip(total, found, strict=True):
                if gradient is not None:
                    sum_ += gradient
        return -torch.cat([g.reshape(len(g), -1) for g in total], dim=1).float()
