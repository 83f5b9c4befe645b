"""One step of many clients at once, on a GPU as a recorded graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbranch.sim.engines.stacked.batches import Batch, Shelf, groups, select_into, selected
from fedbranch.sim.engines.stacked.model import Stack, StackedModel
from fedbranch.training.local_training import LocalTraining

__all__ = ["Lanes", "Part"]


class Part:
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
        shelf: Shelf,
        *,
        train: bool,
        seeds: Tensor | None = None,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run the models on the rows; give outputs and targets."""
        own_seeds = None if seeds is None else seeds[self.lanes]
        x, y = (selected(part, self.rows) for part in (shelf.x, shelf.y))
        outputs = model.outputs(self.stack, x, train=train, seeds=own_seeds, step=step)
        if self._chosen and train:
            for name, buffer in self.stack.buffers.items():
                self._whole.buffers[name][self.lanes] = buffer
        return outputs, y


class Lanes:
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

    def step(self, step: int, shelf: Shelf, batch: Batch) -> None:
        """Train every client on one mini-batch."""
        if not self._goes_together:
            self._step_in_groups(step, shelf, batch)
            return
        self.step_number.fill_(step)
        self.counts.copy_(batch.counts)
        if self._x is None or not self._can_record:
            self._x, self._y = (selected(part, batch.rows) for part in (shelf.x, shelf.y))
        else:
            select_into(self._x, shelf.x, batch.rows)
            select_into(self._y, shelf.y, batch.rows)
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

    def _step_in_groups(self, step: int, shelf: Shelf, batch: Batch) -> None:
        losses = torch.zeros_like(self.total_loss)
        width = batch.rows.shape[1]
        for lanes, own_counts in groups(batch.known_counts, pads=self.pads, width=width):
            part = Part(self.stack, batch.rows, lanes, own_counts)
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
