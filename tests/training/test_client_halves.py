import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbranch import LocalTraining
from fedbranch.data import Examples
from fedbranch.training.client import local_update
from fedbranch.training.half_split import half_rows, training_seeds
from fedbranch.training.model_state import ModelState
from training.one_client import examples, linear, task_at_start, update_of


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 2))


def update_on_halves(model, data, training, halves=3, seed=5, halves_seed=11):
    task = replace(task_at_start(model), halves=halves)
    return local_update(
        copy.deepcopy(model), ModelState.of(model), task, data, training,
        seed=seed, halves_seed=halves_seed,
    )  # fmt: skip


@pytest.mark.parametrize("make", [linear, normalised])
@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(epochs=2, batch_size=8),
        LocalTraining(steps=5, batch_size=8, send_gradient=True),
    ],
)
@pytest.mark.parametrize("num_rows", [4, 31])
def test_both_halves_start_at_the_same_parameters(make, training, num_rows):
    model, data = make(), examples(num_rows)
    on_a_half = replace(training, epochs=4) if training.epochs else training
    a, b = (
        update_of(model, Examples(data.x[rows], data.y[rows]), on_a_half, seed=seed)
        for rows, seed in zip(half_rows(num_rows, 11, 3), training_seeds(5), strict=True)
    )

    update = update_on_halves(model, data, training)

    assert np.array_equal(update.vector, (a.vector + b.vector) / 2)
    assert np.array_equal(update.buffers, (a.buffers + b.buffers) / 2)
    compared = (a.signal, b.signal) if training.send_gradient else (a.vector, b.vector)
    assert np.array_equal(update.half_difference, (compared[0] - compared[1]) / 2)
    assert update.half_difference.any()
    if training.send_gradient:
        assert np.array_equal(update.signal, (a.signal + b.signal) / 2)
    visits = [on_a_half.num_visits(int(half.num_examples)) for half in (a, b)]
    loss = (a.metrics["loss"] * visits[0] + b.metrics["loss"] * visits[1]) / sum(visits)
    assert update.metrics["loss"] == pytest.approx(loss)
    assert update.num_examples == num_rows
    assert update.base == "0.0"


def test_the_number_of_a_task_decides_its_halves():
    model, data, training = linear(), examples(), LocalTraining(epochs=1)
    first, same, other = (update_on_halves(model, data, training, n) for n in (3, 3, 4))

    assert np.array_equal(first.half_difference, same.half_difference)
    assert not np.array_equal(first.half_difference, other.half_difference)


@pytest.mark.parametrize(("num_rows", "halves_seed"), [(3, 11), (30, None)])
def test_a_client_that_cannot_split_its_examples_trains_on_all(num_rows, halves_seed):
    model, data, training = linear(), examples(num_rows), LocalTraining(epochs=1)

    update = update_on_halves(model, data, training, halves_seed=halves_seed)

    assert update.half_difference is None
    assert np.array_equal(update.vector, update_of(model, data, training, seed=5).vector)
