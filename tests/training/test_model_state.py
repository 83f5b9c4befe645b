import numpy as np
import pytest
import torch
from torch import nn

from fedbranch.training.model_state import ModelState


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_a_state_moved_by_the_steps_to_another_state_is_that_state():
    before, after = ModelState.of(model(0)), ModelState.of(model(1))

    moved = before.moved_by(*after.minus(before))

    np.testing.assert_allclose(moved.params, after.params, atol=1e-6)
    assert torch.equal(moved.buffers, after.buffers)


def test_a_loaded_state_is_the_models_state():
    state, other = ModelState.of(model(0)), model(1)

    state.load_into(other)

    assert ModelState.of(other).digest() == state.digest() != ModelState.of(model(1)).digest()


def test_a_model_without_parameters_is_named():
    with pytest.raises(ValueError, match="Flatten has no trainable parameters"):
        ModelState.of(nn.Flatten())
