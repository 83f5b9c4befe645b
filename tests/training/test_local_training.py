import pytest
from torch import nn

from fedbranch import LocalTraining
from fedbranch.training.local_training import accuracy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one"),
        ({"epochs": 1, "steps": 1}, "exactly one"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": -1}, "steps is -1"),
        ({"epochs": 1, "batch_size": 0}, "batch_size is 0"),
        ({"epochs": 1, "metrics": {"loss": accuracy}}, "'loss'"),
        ({"epochs": 1, "precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        LocalTraining(**settings)


def test_only_a_classifier_has_an_accuracy_by_default():
    training = LocalTraining(epochs=1, loss=nn.functional.mse_loss)

    assert list(training.measures) == ["loss"]
    assert list(LocalTraining(epochs=1).measures) == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("settings", "num_rows", "batches", "steps", "visits"),
    [
        ({"epochs": 3, "batch_size": 10}, 25, 3, 9, 75),
        ({"epochs": 3, "batch_size": 10}, 21, 2, 6, 63),  # the example left over joins a batch
        ({"epochs": 3, "batch_size": 10}, 1, 1, 3, 3),
        ({"epochs": 3, "batch_size": 1}, 4, 4, 12, 12),
        ({"steps": 7, "batch_size": 10}, 25, 3, 7, 60),  # two passes and a batch
    ],
)
def test_batches_steps_and_visits_are_those_counted_by_hand(
    settings, num_rows, batches, steps, visits
):
    training = LocalTraining(**settings)

    assert training.batches_per_pass(num_rows) == batches
    assert training.num_steps(num_rows) == steps
    assert training.num_visits(num_rows) == visits
