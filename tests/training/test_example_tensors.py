import numpy as np
import pytest
import torch
from torch import nn

from fedbranch.data import Examples
from fedbranch.training.example_tensors import example_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floating_inputs_get_the_models_precision_and_targets_keep_their_type(dtype):
    data = Examples(np.ones((3, 2)), np.array([0, 1, 0]))

    x, y = example_tensors(data, nn.Linear(2, 2).to(dtype))

    assert x.dtype == dtype
    assert y.dtype == torch.int64


def test_read_only_arrays_are_copied():
    numbers = np.ones((3, 2), dtype=np.float32)
    numbers.flags.writeable = False

    x, _ = example_tensors((numbers, np.zeros(3)), nn.Linear(2, 2))
    x += 1

    assert (numbers == 1).all()


def test_tensors_are_returned_unchanged():
    data = torch.ones(3, 2, dtype=torch.float64), torch.zeros(3)

    x, y = example_tensors(data, nn.Linear(2, 2))

    assert x is data[0]
    assert y is data[1]
