import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedbranch import LocalTraining
from fedbranch.data import Examples
from fedbranch.protocol.tasks import Trial
from fedbranch.training.client import evaluate, trial_losses
from fedbranch.training.half_split import half_rows
from fedbranch.training.local_training import accuracy
from fedbranch.training.model_state import ModelState
from training.one_client import examples, linear, update_of


def test_evaluation_is_in_evaluation_mode_and_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 2))
    model.train()
    data, training = examples(num_rows=2500), LocalTraining(epochs=1)
    before = copy.deepcopy(model.state_dict())

    first, second = (evaluate(model, data, training) for _ in range(2))

    assert first == second
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        outputs = model(torch.tensor(data.x))
    assert first["accuracy"] == pytest.approx(float(accuracy(outputs, torch.tensor(data.y))))
    assert first["loss"] == pytest.approx(
        float(nn.functional.cross_entropy(outputs, torch.tensor(data.y))), rel=1e-6
    )


def test_a_model_that_is_random_in_evaluation_draws_the_same_every_time():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x) + torch.randn(len(x), 2)

    torch.manual_seed(0)
    model, training = Noisy(), LocalTraining(epochs=1, send_gradient=True)
    before = torch.random.get_rng_state()

    first = evaluate(model, examples(), training), update_of(model, examples(), training)
    second = evaluate(model, examples(), training), update_of(model, examples(), training)

    assert first[0] == second[0]
    assert np.array_equal(first[1].signal, second[1].signal)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_regression_has_its_own_loss_and_metrics():
    model = nn.Linear(4, 1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype(np.float32)
    data = Examples(x, x.sum(axis=1, keepdims=True))
    training = LocalTraining(
        epochs=1, loss=nn.functional.mse_loss, metrics={"mae": nn.functional.l1_loss}
    )

    assert set(evaluate(model, data, training)) == {"loss", "mae"}
    assert update_of(model, data, training).vector.shape == (5,)


def test_trials_measure_the_loss_under_other_parameters():
    model, train, held_out = linear(), examples(31), examples(9, seed=1)
    first, second = half_rows(31, 11, 3)
    rows = {
        "held-out": held_out,
        "first half": Examples(train.x[first], train.y[first]),
        "second half": Examples(train.x[second], train.y[second]),
    }
    rng = np.random.default_rng(0)
    trials = [
        Trial(
            params=rng.normal(size=10).astype(np.float32),
            buffers=np.zeros(0, np.float32),
            on=on,
            halves=None if on == "held-out" else 3,
        )
        for on in ("second half", "held-out", "first half", "held-out")
    ]

    losses = trial_losses(
        copy.deepcopy(model), ModelState.of(model), trials, train, held_out,
        LocalTraining(epochs=1), halves_seed=11,
    )  # fmt: skip

    for trial, loss in zip(trials, losses, strict=True):
        tried = copy.deepcopy(model)
        ModelState.of(model).moved_by(trial.params, trial.buffers).load_into(tried)
        x, y = map(torch.tensor, rows[trial.on])
        assert loss == pytest.approx(nn.functional.cross_entropy(tried(x), y).item(), rel=1e-5)
    assert len(set(losses)) == 4


@pytest.mark.parametrize(
    ("on", "num_rows", "held_out"), [("held-out", 30, None), ("first half", 3, examples())]
)
def test_a_client_without_the_examples_of_a_trial_has_no_losses(on, num_rows, held_out):
    model = linear()
    zeros = np.zeros(10, np.float32)
    trials = [Trial(params=zeros, buffers=zeros[:0], on=on, halves=None if on == "held-out" else 1)]

    losses = trial_losses(
        model, ModelState.of(model), trials, examples(num_rows), held_out,
        LocalTraining(epochs=1), halves_seed=0,
    )  # fmt: skip

    assert losses is None
