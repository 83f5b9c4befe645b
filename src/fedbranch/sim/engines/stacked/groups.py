"""Models that go through the stacked model together.

If batches may be padded, all models go together. Otherwise, as with BatchNorm, only models with
equally large batches do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbranch.sim.engines.stacked.batches import StackedExamples, take
from fedbranch.sim.engines.stacked.model import StackedModel
from fedbranch.sim.engines.stacked.state import StackedState
from fedbranch.training.local_training import Measure

__all__ = ["ModelGroup", "model_groups"]


class ModelGroup:
    """Some models of a stack, or all of them, and a batch for each.

    Parameters
    ----------
    state
        Of all models of the stack.
    rows
        Shape (num_models, width), for all models.
    models
        Numbers of the models of this group; None for all.
    counts
        How many first examples count, for each model of this group.

    Attributes
    ----------
    models, num_examples
        Shape (num_models of this group,): their numbers, and how many examples count.
    """

    def __init__(
        self,
        state: StackedState,
        rows: Tensor,
        models: NDArray[np.intp] | None,
        counts: NDArray[np.int64],
    ) -> None:
        device = rows.device
        width = int(counts.max())
        self.models = torch.from_numpy(np.arange(len(rows)) if models is None else models).to(
            device
        )
        self.num_examples = torch.from_numpy(counts).to(device)
        self._counts = None if bool((counts == width).all()) else self.num_examples
        self._whole = state
        if models is None:
            self._rows, self._state = rows[:, :width], state
        else:
            self._rows, self._state = rows[self.models, :width], state.of_models(self.models)

    def outputs(
        self,
        model: StackedModel,
        examples: StackedExamples,
        *,
        train: bool,
        seeds: Tensor | None = None,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run the models on their batches; return outputs and targets.

        In training mode, new buffers are written to the state of all models.
        """
        own_seeds = None if seeds is None else seeds[self.models]
        x, y = (take(values, self._rows) for values in (examples.x, examples.y))
        outputs = model.outputs(self._state, x, train=train, seeds=own_seeds, step=step)
        if self._state is not self._whole and train:
            for name, buffer in self._state.buffers.items():
                self._whole.buffers[name][self.models] = buffer
        return outputs, y

    def means(self, model: StackedModel, measure: Measure, outputs: Tensor, y: Tensor) -> Tensor:
        """Measure every model's outputs over the examples that count."""
        return model.means(measure, outputs, y, self._counts)


def model_groups(
    state: StackedState, rows: Tensor, counts: NDArray[np.int64], *, can_pad: bool
) -> Iterator[ModelGroup]:
    """Split a stack into groups of models that go together.

    Parameters
    ----------
    state
        Of all models.
    rows
        Shape (num_models, width): a batch for each model.
    counts
        Shape (num_models,): how many first examples of each batch count.
    can_pad
        Whether examples that do not count change nothing.

    Yields
    ------
    ModelGroup
        Models without any example that counts may be in no group.
    """
    if can_pad or bool((counts == rows.shape[1]).all()):
        yield ModelGroup(state, rows, None, counts)
        return
    for count in np.unique(counts[counts > 0]):
        models = np.flatnonzero(counts == count)
        yield ModelGroup(state, rows, models, counts[models])
