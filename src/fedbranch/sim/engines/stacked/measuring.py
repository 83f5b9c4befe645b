"""Measuring many models at once, each on its own examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedbranch.sim.engines.model_source import ModelSource
from fedbranch.sim.engines.stacked.batches import StackedExamples
from fedbranch.sim.engines.stacked.groups import model_groups
from fedbranch.sim.engines.stacked.model import StackedModel
from fedbranch.sim.engines.stacked.state import flat_states
from fedbranch.training.client import EVALUATION_BATCH_SIZE
from fedbranch.training.local_training import Measure
from fedbranch.training.model_state import ModelState

__all__ = ["measure_models"]


@torch.no_grad()
def measure_models(
    model: StackedModel,
    initial: ModelState,
    sources: Sequence[ModelSource],
    examples: StackedExamples,
    measures: Mapping[str, Measure],
) -> dict[str, NDArray[np.float64]]:
    """Measure the model of each source on its own examples, in evaluation mode.

    Returns
    -------
    dict
        Name of the measure -> its mean over each model's examples, shape (num_models,).
    """
    state = model.state(*flat_states(initial, sources))
    device = initial.params.device
    totals = {
        name: torch.zeros(len(sources), dtype=torch.float64, device=device) for name in measures
    }
    for rows, counts in examples.batches(EVALUATION_BATCH_SIZE):
        for group in model_groups(state, rows, counts, can_pad=model.can_pad_measuring):
            outputs, y = group.outputs(model, examples, train=False)
            for name, measure in measures.items():
                means = group.means(model, measure, outputs, y).double()
                totals[name].index_add_(0, group.models, means * group.num_examples)
    return {name: total.cpu().numpy() / examples.sizes for name, total in totals.items()}
