import pytest
import torch
from torch import nn
from torch.nn import functional

from fedbranch.sim.engines.stacked.requirements import is_mean_over_examples


def weighted(outputs, targets):
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 20.0]))


def precision(outputs, targets):
    found = outputs.argmax(1) == 1
    return (found & (targets == 1)).sum() / found.sum().clamp(min=1)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), False),
        (nn.CrossEntropyLoss(ignore_index=2), False),
        (nn.CrossEntropyLoss(reduction="sum"), False),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), False),
        (nn.MSELoss(), True),
        (functional.mse_loss, True),
        (weighted, False),
        (precision, False),
    ],
)
def test_only_known_means_over_examples_are_treated_as_such(measure, expected):
    assert is_mean_over_examples(measure) is expected
