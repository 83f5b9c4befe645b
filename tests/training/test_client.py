import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbranch import LocalTraining, Task, sgd
from fedbranch.data import Examples
from fedbranch.protocol.tasks import Trial
from fedbranch.training.client import evaluate, local_update, trial_losses
from fedbranch.training.half_split import half_rows, training_seeds
from fedbranch.training.hashed_random import permutations
from fedbranch.training.local_training import accuracy, adam
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed


def examples(num_rows=30, num_features=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_features)).astype(np.float32)
    return Examples(x, (x[:, 0] > 0).astype(np.int64))


def task_at_start(model):
    state = ModelState.of(model)
    return Task(
        node_id=0,
        params=np.zeros(len(state.params), dtype=np.float32),
        buffers=np.zeros(len(state.buffers), dtype=np.float32),
        base="0.0",
        purpose="train",
    )


def update_of(model, data, training, seed=1):
    work = copy.deepcopy(model)
    return local_update(work, ModelState.of(model), task_at_start(model), data, training, seed=seed)


def linear(num_features=4, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(num_features, 2)


def test_one_full_batch_step_by_hand():
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


def test_the_task_says_where_to_train():
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
def test_any_optimiser_factory_will_do(optimizer):
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


def test_an_optimiser_that_asks_for_the_loss_again_and_again():
    training = LocalTraining(optimizer=torch.optim.LBFGS, epochs=1, batch_size=30)

    assert update_of(linear(), examples(), training).vector.any()


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


def test_batches_of_one_stay_batches_of_one():
    # Four steps of one example each, not three steps of which the last has two.
    model, data = linear(), examples(num_rows=4)

    by_epochs = update_of(model, data, LocalTraining(epochs=1, batch_size=1))
    by_steps = update_of(model, data, LocalTraining(steps=4, batch_size=1))

    assert np.array_equal(by_epochs.vector, by_steps.vector)
    assert not np.array_equal(
        by_steps.vector, update_of(model, data, LocalTraining(steps=3, batch_size=1)).vector
    )


def test_without_a_class_to_hit_there_is_no_accuracy():
    training = LocalTraining(epochs=1, loss=nn.functional.mse_loss)

    assert list(training.measures) == ["loss"]
    assert list(LocalTraining(epochs=1).measures) == ["loss", "accuracy"]


def test_own_loss_and_metrics_for_a_regression():
    model = nn.Linear(4, 1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype(np.float32)
    data = Examples(x, x.sum(axis=1, keepdims=True))
    training = LocalTraining(
        epochs=1, loss=nn.functional.mse_loss, metrics={"mae": nn.functional.l1_loss}
    )

    assert set(evaluate(model, data, training)) == {"loss", "mae"}
    assert update_of(model, data, training).vector.shape == (5,)


def test_streams_depend_on_each_part_of_their_place():
    seeds = {
        stream_seed(seed, number, client_id)
        for seed in range(3)
        for number in range(3)
        for client_id in ("a", "b")
    }
    assert len(seeds) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 23) != stream_seed(12, 3)


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


def test_a_model_without_parameters_is_named():
    with pytest.raises(ValueError, match="Flatten has no trainable parameters"):
        ModelState.of(nn.Flatten())


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
def test_halves_are_trained_on_from_the_same_start(make, training, num_rows):
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


def test_the_halves_of_a_task_are_named_by_its_number():
    model, data, training = linear(), examples(), LocalTraining(epochs=1)
    first, same, other = (update_on_halves(model, data, training, n) for n in (3, 3, 4))

    assert np.array_equal(first.half_difference, same.half_difference)
    assert not np.array_equal(first.half_difference, other.half_difference)


@pytest.mark.parametrize(("num_rows", "halves_seed"), [(3, 11), (30, None)])
def test_who_cannot_make_halves_trains_as_usual(num_rows, halves_seed):
    model, data, training = linear(), examples(num_rows), LocalTraining(epochs=1)

    update = update_on_halves(model, data, training, halves_seed=halves_seed)

    assert update.half_difference is None
    assert np.array_equal(update.vector, update_of(model, data, training, seed=5).vector)


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
def test_who_lacks_the_examples_of_a_trial_gives_no_losses(on, num_rows, held_out):
    model = linear()
    zeros = np.zeros(10, np.float32)
    trials = [Trial(params=zeros, buffers=zeros[:0], on=on, halves=None if on == "held-out" else 1)]

    losses = trial_losses(
        model, ModelState.of(model), trials, examples(num_rows), held_out,
        LocalTraining(epochs=1), halves_seed=0,
    )  # fmt: skip

    assert losses is None
