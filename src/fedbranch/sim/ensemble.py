"""Several classifiers as one model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Ensemble"]


class Ensemble(nn.Module):
    """A classifier that averages the probabilities of other classifiers.

    Parameters
    ----------
    models
        Classifiers, at least one. Their outputs have one column for each class, before the
        softmax.

    Examples
    --------
    >>> sure, unsure = nn.Identity(), nn.ReLU()  # of the input below
    >>> Ensemble([sure, unsure])(torch.tensor([[-50.0, 0.0]])).exp()
    tensor([[0.2500, 0.7500]])
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        if not models:
            raise ValueError("an ensemble needs at least one model")
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logarithm of the mean probabilities, for argmax and cross-entropy."""
        outputs = [model(x) for model in self.models]
        if outputs[0].ndim < 2 or outputs[0].shape[1] < 2:
            raise ValueError(
                f"the models' outputs have shape {tuple(outputs[0].shape)}; an ensemble averages "
                "the probabilities of classifiers, which have one column for each class"
            )
        logarithms = torch.stack([output.log_softmax(dim=1) for output in outputs])
        return logarithms.logsumexp(dim=0) - math.log(len(outputs))
