"""One step of many models at once, on a GPU as a recorded graph."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbranch.sim.engines.stacked.batches import Batch, StackedExamples, take, take_into
from fedbranch.sim.engines.stacked.groups import model_groups
from fedbranch.sim.engines.stacked.model import StackedModel
from fedbranch.sim.engines.stacked.state import StackedState
from fedbranch.training.local_training import LocalTraining

__all__ = ["TrainingStep"]


class TrainingStep:
    """The state of models in training, and one step of all of them.

    On a GPU the second step is recorded as a graph. All other steps, in later rounds too,
    replay it: launching its kernels one by one would take longer than running them. The first
    step of a round is not replayed, because it sets up the optimiser.

    Parameters
    ----------
    model, training
        What to train, and how.
    is_even
        Whether all models have equally large batches in every step. Otherwise batches are
        padded, or models go in groups if the model does not allow padding.

    Attributes
    ----------
    state
        The models' present numbers.
    total_loss
        Shape (num_models,): the sum of the losses over all visits to examples.
    """

    def __init__(self, model: StackedModel, training: LocalTraining, *, is_even: bool) -> None:
        self._model = model
        self._training = training
        self._can_pad = model.can_pad_training and not is_even
        self._goes_together = model.can_pad_training or is_even
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_state: list[dict[str, Tensor]] = []
        self._x: Tensor | None = None

    def load(self, start: StackedState, seeds: Tensor) -> None:
        """Start a round of training at these numbers, with one seed for each model."""
        if self._graph is None:
            for param in start.params.values():
                param.requires_grad_()
            self.state = start
            self._seeds = seeds
            self._step_number = torch.zeros((), dtype=torch.int64, device=seeds.device)
            self._counts = torch.zeros_like(seeds)
            self.total_loss = torch.zeros(len(seeds), device=seeds.device)
        else:
            with torch.no_grad():
                for kept, new in zip(self.state, start, strict=True):
                    for name, tensor in kept.items():
                        tensor.copy_(new[name])
                self._seeds.copy_(seeds)
                self.total_loss.zero_()
        self._optimizer = self._training.optimizer(list(self.state.params.values()))
        self._can_record = seeds.is_cuda and self._goes_together
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = seeds.is_cuda
            elif not isinstance(self._optimizer, torch.optim.SGD):
                self._can_record = False

    def run(self, step: int, examples: StackedExamples, batch: Batch) -> None:
        """Train every model on one mini-batch; steps of a round count from 0."""
        if not self._goes_together:
            self._step_in_groups(step, examples, batch)
            return
        self._step_number.fill_(step)
        self._counts.copy_(batch.counts)
        if self._x is None or not self._can_record:
            self._x, self._y = (take(values, batch.rows) for values in (examples.x, examples.y))
        else:
            take_into(self._x, examples.x, batch.rows)
            take_into(self._y, examples.y, batch.rows)
        if not self._can_record or step == 0:
            self._step_together(has_padding=self._can_pad and batch.has_padding)
            return
        if step == 1:
            self._restore_optimizer()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step_together(has_padding=self._can_pad)
            self._graph_state = self._optimizer_state()
        self._graph.replay()

    def _step_together(self, *, has_padding: bool) -> None:
        assert self._x is not None
        outputs = self._model.outputs(
            self.state, self._x, train=True, seeds=self._seeds, step=self._step_number
        )
        counts = self._counts if has_padding else None
        losses = self._model.means(self._training.loss, outputs, self._y, counts)
        self._descend(losses, self._counts)

    def _step_in_groups(self, step: int, examples: StackedExamples, batch: Batch) -> None:
        losses = torch.zeros_like(self.total_loss)
        for group in model_groups(self.state, batch.rows, batch.host_counts, can_pad=self._can_pad):
            outputs, y = group.outputs(
                self._model, examples, train=True, seeds=self._seeds, step=step
            )
            means = group.means(self._model, self._training.loss, outputs, y)
            losses = losses.index_add(0, group.models, means.to(losses.dtype))
        self._descend(losses, batch.counts)

    def _descend(self, losses: Tensor, num_examples: Tensor) -> None:
        params = list(self.state.params.values())
        gradients = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        self._optimizer.step()
        self.total_loss += losses.detach() * num_examples

    def _restore_optimizer(self) -> None:
        """Copy the optimiser's state of this round's first step to the memory of the graph."""
        for kept, new in zip(self._graph_state, self._optimizer_state(), strict=False):
            for name, tensor in kept.items():
                if tensor is not new[name]:
                    tensor.copy_(new[name])

    def _optimizer_state(self) -> list[dict[str, Tensor]]:
        return [
            {n: v for n, v in self._optimizer.state[param].items() if isinstance(v, Tensor)}
            for param in self.state.params.values()
        ]
