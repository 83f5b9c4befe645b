import numpy as np
import pytest
import torch
from torch import nn

from fedbranch import LocalTraining
from fedbranch.data import Examples
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.model_state import ModelState
from training.one_client import examples, linear, task_at_start, update_of


def test_batchnorm_statistics_travel_as_buffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    data = examples()

    update = update_of(model, data, LocalTraining(epochs=2, batch_size=10))

    assert update.buffers.shape == (7,)  # running mean, running variance, one counter
    assert update.buffers[6] == 6  # batches seen: a whole number
    assert update.buffers[:6].any()
    ModelState.of(model).moved_by(update.vector, update.buffers).load_into(model)
    assert model[1].num_batches_tracked == 6
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_a_lone_last_example_does_not_stop_batchnorm():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    update = update_of(model, examples(num_rows=21), LocalTraining(epochs=1, batch_size=10))

    assert update.buffers[-1] == 2


def test_constant_buffers_of_any_kind_stay_exactly_what_they_are():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("mask", torch.full((3,), -torch.inf))
            self.register_buffer("unknown", torch.full((2,), torch.nan))
            self.register_buffer("large", torch.tensor(2**53 - 1))
            self.register_buffer("phase", torch.tensor(1 + 2j))
            self.register_buffer("flag", torch.tensor(True))

        def forward(self, x):
            return self.linear(x)

    model, work = Odd(), Odd()
    initial = ModelState.of(model)

    update = local_update(
        work, initial, task_at_start(model), examples(), LocalTraining(epochs=1), seed=1
    )

    assert np.isfinite(update.buffers).all()
    assert not update.buffers.any()
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(work.named_buffers())[name].nan_to_num(7), buffer.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_precision_train_in_it(dtype):
    model = linear().to(dtype)

    update = update_of(model, examples(), LocalTraining(epochs=1))

    assert update.vector.dtype == np.float32
    assert update.vector.any()
    assert set(evaluate(model, examples(), LocalTraining(epochs=1))) == {"loss", "accuracy"}


def test_complex_parameters_travel_as_pairs():
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    update = update_of(Phases(), examples(), LocalTraining(epochs=1))

    assert update.vector.shape == (16,)
    assert update.vector.any()


def test_sparse_gradients_can_be_sent():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten())
    data = Examples(np.arange(5)[:, None], np.array([0, 1, 0, 1, 0]))

    update = update_of(model, data, LocalTraining(epochs=1, send_gradient=True))

    assert update.signal.shape == (10,)


def test_frozen_parameters_stay_out_of_the_update():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)

    update = update_of(model, examples(), LocalTraining(epochs=1))

    assert update.vector.shape == (8,)
