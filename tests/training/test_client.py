import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedbranch import LocalTraining, Task, sgd
from fedbranch.training.client import local_update
from fedbranch.training.hashed_random import permutations
from fedbranch.training.local_training import adam
from fedbranch.training.model_state import ModelState
from training.one_client import examples, linear, update_of


def test_one_full_batch_step_is_the_one_worked_out_by_hand():
    model, data = linear(), examples()
    loss = nn.functional.cross_entropy(model(torch.tensor(data.x)), torch.tensor(data.y))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = -0.5 * torch.cat([g.reshape(-1) for g in gradients])

    update = update_of(
        model, data, LocalTraining(optimizer=sgd(0.5), epochs=1, batch_size=len(data.x))
    )

    np.testing.assert_allclose(update.vector, expected, atol=1e-7)
    assert update.num_examples == 30
    assert update.metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert update.base == "0.0"


def test_a_plain_loop_over_the_same_batches_gives_the_same_update():
    model, data = linear(), examples()
    training = LocalTraining(optimizer=sgd(0.1, momentum=0.9), epochs=3, batch_size=8)
    update = update_of(model, data, training, seed=5)

    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.tensor(data.x), torch.tensor(data.y)
    orders = permutations(torch.tensor([5]), torch.tensor([30]), range(3), 30)[0]
    for order in orders:
        for start in range(0, 30, 8):
            rows = order[start : start + 8]
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference(x[rows]), y[rows]).backward()
            optimizer.step()

    expected = ModelState.of(reference).params - ModelState.of(model).params
    assert np.array_equal(update.vector, expected.numpy())


def test_training_starts_at_the_parameters_of_the_task():
    model, data = linear(), examples()
    training = LocalTraining(epochs=1)
    moved = np.full(10, 0.25, dtype=np.float32)
    task = Task(
        node_id=3, params=moved, buffers=np.zeros(0, np.float32), base="3.1", purpose="train"
    )
    displaced = copy.deepcopy(model)
    with torch.no_grad():
        for param in displaced.parameters():
            param += 0.25

    update = local_update(copy.deepcopy(model), ModelState.of(model), task, data, training, seed=1)

    assert np.array_equal(update.vector, update_of(displaced, data, training).vector)


def test_steps_count_mini_batches_across_passes():
    model, data = linear(), examples(num_rows=30)
    by_steps = update_of(model, data, LocalTraining(steps=8, batch_size=8))  # two passes of 4
    by_epochs = update_of(model, data, LocalTraining(epochs=2, batch_size=8))
    fewer = update_of(model, data, LocalTraining(steps=7, batch_size=8))

    assert np.array_equal(by_steps.vector, by_epochs.vector)
    assert not np.array_equal(by_steps.vector, fewer.vector)


@pytest.mark.parametrize("optimizer", [adam(0.01), torch.optim.AdamW, sgd(0.1, weight_decay=0.1)])
def test_any_optimiser_factory_trains(optimizer):
    model, data = linear(), examples()

    update = update_of(model, data, LocalTraining(optimizer=optimizer, epochs=1))

    assert np.isfinite(update.vector).all()
    assert update.vector.any()


def test_the_same_seed_gives_the_same_bytes_and_leaves_global_randomness_alone():
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    data, training = examples(), LocalTraining(epochs=2)
    torch.manual_seed(77)
    expected_draw = torch.rand(3)

    torch.manual_seed(77)
    first = update_of(model, data, training, seed=3)
    drawn = torch.rand(3)
    torch.manual_seed(123)
    second = update_of(model, data, training, seed=3)
    other = update_of(model, data, training, seed=4)

    assert torch.equal(drawn, expected_draw)
    assert np.array_equal(first.vector, second.vector)
    assert not np.array_equal(first.vector, other.vector)


def test_an_optimiser_that_computes_the_loss_several_times_a_step_trains():
    training = LocalTraining(optimizer=torch.optim.LBFGS, epochs=1, batch_size=30)

    assert update_of(linear(), examples(), training).vector.any()


def test_the_gradient_signal_is_the_negative_full_batch_gradient():
    model, data = linear(), examples(num_rows=3000)  # more than one evaluation batch
    loss = nn.functional.cross_entropy(model(torch.tensor(data.x)), torch.tensor(data.y))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = -torch.cat([g.reshape(-1) for g in gradients])

    plain = update_of(model, data, LocalTraining(epochs=1))
    both = update_of(model, data, LocalTraining(epochs=1, send_gradient=True))

    np.testing.assert_allclose(both.signal, expected, atol=1e-6)
    assert plain.signal is None
    assert np.array_equal(plain.vector, both.vector)


def test_batches_of_one_stay_batches_of_one():
    # Four steps of one example each; not three steps, the last with two examples.
    model, data = linear(), examples(num_rows=4)

    by_epochs = update_of(model, data, LocalTraining(epochs=1, batch_size=1))
    by_steps = update_of(model, data, LocalTraining(steps=4, batch_size=1))

    assert np.array_equal(by_epochs.vector, by_steps.vector)
    assert not np.array_equal(
        by_steps.vector, update_of(model, data, LocalTraining(steps=3, batch_size=1)).vector
    )
