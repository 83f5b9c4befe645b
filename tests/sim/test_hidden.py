"""Hiding of replies: what is hidden, what is refused, and how exact the numbers stay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.privacy import Privacy
from fedbranch.sim.hidden import Hiding
from fedbranch.training.model_state import ModelState
from sim.hidden_runs import PERMUTATION, ROTATION, SECRET, clients, simulate, with_batch_norm


def test_a_reply_that_cannot_be_hidden_is_never_sent():
    def without_end(client_id, this_round, update):
        return replace(update, vector=update.vector[:-1])

    with pytest.raises(
        fb.ClientFailed, match=r"could not hide its reply: plain vectors have shape"
    ):
        simulate(ROTATION, before_send=without_end, rounds=1)


@pytest.mark.parametrize("column", ["vector", "buffers"])
@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda values: values.tolist(), "a vector is a list; only arrays can be hidden"),
        (lambda values: "0.5", "a vector is a str; only arrays can be hidden"),
        (lambda values: values.astype(int), "only floats can be mixed"),
    ],
)
def test_a_reply_of_the_wrong_kind_is_never_sent(column, spoiled, message):
    def bad(client_id, this_round, update):
        if client_id != "client-3":
            return update
        return replace(update, **{column: spoiled(getattr(update, column))})

    with pytest.raises(fb.ClientFailed, match=f"client 'client-3' could not hide.*{message}"):
        simulate(ROTATION, model="BatchNorm", before_send=bad, rounds=1)


def test_a_reply_that_is_no_update_or_not_finite_is_refused_like_any_bad_reply():
    def broken(client_id, this_round, update):
        if client_id == "client-0":
            return None
        return replace(update, vector=update.vector / 0) if client_id == "client-1" else update

    with np.errstate(all="ignore"):
        run = simulate(ROTATION, before_send=broken, rounds=1)

    refused = run.history[0].record.refused
    assert list(refused.values()) == [
        "the reply is a NoneType; send an Update",
        "the update contains NaN or infinity; lower the learning rate",
    ]


@pytest.mark.parametrize("kind", ["rotation", "permutation"])
def test_a_counter_that_grows_does_not_blur_the_statistics_beside_it(kind):
    model = with_batch_norm()
    hiding = Hiding(Privacy(SECRET, transform=kind), model)
    names = [name for name, buffer in model.named_buffers() for _ in range(buffer.numel())]
    is_counter = np.array([name.endswith("num_batches_tracked") for name in names])
    params = np.ones(hiding.num_params, np.float32)
    hidden = np.zeros(hiding.num_buffers, np.float32)
    for _ in range(1000):
        _, plain = hiding.revealed(params, hidden)
        # A unit that is always off: its running variance goes from 1 to 0.
        step = np.where(is_counter, 10, 0.1 * (-1 - plain)).astype(np.float32)
        update = fb.Update(
            np.ones(ModelState.of(model).params.numel(), np.float32), 1, buffers=step
        )
        hidden = hidden + hiding.hidden(update).buffers

    _, plain = hiding.revealed(params, hidden)

    assert plain[is_counter].tolist() == [10_000]
    assert np.abs(plain[~is_counter] + 1).max() < 2e-6  # far below BatchNorm's eps, 1e-5


class Counting(nn.Module):
    """A linear model that also counts for each input in how many rows it was above zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("num_above", torch.zeros(64, dtype=torch.long))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.num_above += (x > 0).sum(0)
        return self.layer(x)


@pytest.mark.parametrize("privacy", [PERMUTATION, ROTATION], ids=["permutation", "rotation"])
def test_what_a_model_counts_reaches_no_server_in_plain(privacy, monkeypatch):
    sent, plain = [], []
    step = fb.Server.step

    def noted(server, replies, **losses):
        sent.extend(np.asarray(reply.buffers) for reply in replies.values())
        return step(server, replies, **losses)

    def noted_before(client_id, this_round, update):
        plain.append(update.buffers)
        return update

    monkeypatch.setattr(fb.Server, "step", noted)
    settings = {"rounds": 8, "rule": fb.NeverSplit(), "engine": "reference", "weighting": "equal"}
    data = {
        f"client-{i}": clients()["client-0"] for i in range(4)
    }  # equal clients, so that means are whole numbers
    hidden = fb.simulate(Counting(), data, privacy=privacy, before_send=noted_before, **settings)
    shown = fb.simulate(Counting(), data, **settings)

    assert len(plain) == 32
    for ours, theirs in zip(sent, plain, strict=False):
        num_above = theirs[64:]
        assert num_above.max() > 100
        hidden_counts = ours[-64:]
        if privacy is ROTATION:  # a permutation keeps the numbers, but not their places
            num_same = np.isin(ours, num_above[num_above > 0]).sum()
            assert num_same <= 3
        assert (hidden_counts == num_above).mean() < 0.5
    counts = [ours.model_at(0).num_above for ours in (hidden, shown)]
    assert counts[0].max() > 1000
    assert torch.equal(*counts)


@pytest.mark.parametrize(
    "privacy",
    [PERMUTATION, ROTATION, replace(ROTATION, sketch=64)],
    ids=["permutation", "rotation", "sketch"],
)
def test_a_batch_of_any_library_is_hidden_as_one_by_one(privacy):
    model = with_batch_norm()
    hiding = Hiding(privacy, model)
    state = ModelState.of(model)
    rng = np.random.default_rng(0)
    vectors, signals, halves = rng.normal(size=(3, 3, state.params.numel())).astype(np.float32)
    buffers = rng.normal(size=(3, state.buffers.numel())).astype(np.float32)
    halves[1] = 0  # this client trained on all examples
    batch = fb.UpdateBatch(
        client_ids=["a", "b", "c"], vectors=torch.tensor(vectors), num_examples=[1, 2, 3],
        bases=["x"] * 3, metrics=[{}] * 3, buffers=torch.tensor(buffers),
        signals=torch.tensor(signals), half_differences=torch.tensor(halves),
    )  # fmt: skip

    hidden = hiding.hidden_batch(batch)

    for column in (hidden.vectors, hidden.buffers, hidden.signals, hidden.half_differences):
        assert isinstance(column, torch.Tensor)
        assert column.dtype == torch.float32
    assert not hidden.half_differences[1].any()
    for row in range(3):
        alone = hiding.hidden(
            fb.Update(
                vectors[row], 1, buffers=buffers[row], signal=signals[row],
                half_difference=halves[row],
            )
        )  # fmt: skip
        assert np.array_equal(hidden.vectors[row], alone.vector)
        assert np.array_equal(hidden.buffers[row], alone.buffers)
        assert np.array_equal(hidden.signals[row], alone.signal)
        assert np.array_equal(hidden.half_differences[row], alone.half_difference)
        assert alone.signal.shape == (hiding.num_signal or hiding.num_params,)
