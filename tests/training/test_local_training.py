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
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        LocalTraining(**settings)


def test_without_a_class_to_hit_there_is_no_accuracy():
    training = LocalTraining(epochs=1, loss=nn.functional.mse_loss)

    assert list(training.measures) == ["loss"]
    assert list(LocalTraining(epochs=1).measures) == ["loss", "accuracy"]
