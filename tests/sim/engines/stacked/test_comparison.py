import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.sim.engines.stacked.engine import StackedEngine
from fedbranch.sim.engines.stacked.requirements import CannotStack
from fedbranch.training.model_state import ModelState
from sim.engines.small_problems import make_clients, mlp


class ReadsANumber(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 0.5)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (ReadsANumber(6, 3), {}, "item"),
        (Noisy(6, 3), {}, "random"),
        (mlp(nn.AlphaDropout(0.2)), {}, "random"),
        (mlp(), {"optimizer": lambda params: torch.optim.LBFGS(params, lr=0.1)}, "LBFGS"),
        (mlp(), {"optimizer": lambda params: torch.optim.SGD(
            [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(params)])}, "differently"),
    ],
)  # fmt: skip
def test_workers_train_what_cannot_be_stacked_and_the_reason_is_given(model, settings, reason):
    training = fb.LocalTraining(epochs=1, **settings)

    run = fb.fedavg(model, make_clients(), rounds=1, training=training, engine="vectorised")

    assert run.engine.name == "workers"
    assert reason in run.engine.reason
    assert np.any(run.tree.root.params)


def test_clients_of_different_shapes_cannot_be_stacked():
    clients = make_clients() | {"wide": make_clients([4], shape=(7,))["c0"]}

    with pytest.raises(CannotStack, match="differ in shape"):
        StackedEngine(mlp(), ModelState.of(mlp()), clients, fb.LocalTraining(epochs=1))


def test_batches_of_a_model_that_mixes_examples_are_never_padded():
    clients = make_clients([30] * 3)
    training = fb.LocalTraining(epochs=1)

    def can_pad(model):
        return StackedEngine(model, ModelState.of(model), clients, training).model.can_pad_training

    assert can_pad(mlp())
    assert not can_pad(mlp(nn.BatchNorm1d(8)))
