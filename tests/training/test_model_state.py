import pytest
from torch import nn

from fedbranch.training.model_state import ModelState


def test_a_model_without_parameters_is_named():
    with pytest.raises(ValueError, match="Flatten has no trainable parameters"):
        ModelState.of(nn.Flatten())
