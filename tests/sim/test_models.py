import math

import numpy as np
import pytest
import torch

import fedbranch as fb
from fedbranch.sim import language_model
from fedbranch.training.local_training import cross_entropy

NUM_WORDS, LENGTH = 12, 5


def counting_clients(num_clients):
    """Make clients with sentences that count; even clients in steps of 1, odd ones in steps of 2."""
    clients = {}
    for i in range(num_clients):
        start = np.random.default_rng(i).integers(0, NUM_WORDS, (40, 1))
        numbers = (start + (i % 2 + 1) * np.arange(LENGTH + 1)) % NUM_WORDS
        pairs = numbers[:, :-1], numbers[:, 1:]
        clients[f"c{i}"] = fb.ClientData(train=pairs, test=pairs, group=str(i % 2))
    return clients


def test_a_language_model_scores_all_words_at_every_place():
    model = language_model(NUM_WORDS, width=3, hidden=4, seed=0)
    words = torch.arange(10).reshape(2, 5)

    scores = model(words)

    assert scores.shape == (2, NUM_WORDS, 5)
    assert cross_entropy(scores, words).ndim == 0


def test_a_language_model_sees_no_word_after_the_one_it_stands_at():
    model = language_model(NUM_WORDS, width=3, hidden=4, seed=0)
    words = torch.arange(5)[None]
    other = words.clone()
    other[0, 3:] = 11

    assert torch.equal(model(words)[:, :, :3], model(other)[:, :, :3])
    assert not torch.equal(model(words)[:, :, 3:], model(other)[:, :, 3:])


def test_the_seed_decides_and_nothing_else_is_drawn():
    torch.manual_seed(1)
    first = language_model(NUM_WORDS, width=3, hidden=4, seed=0)
    drawn = torch.rand(1)
    same, other = (language_model(NUM_WORDS, width=3, hidden=4, seed=seed) for seed in (0, 1))
    torch.manual_seed(1)

    assert torch.equal(first.output.weight, same.output.weight)
    assert not torch.equal(first.output.weight, other.output.weight)
    assert torch.equal(drawn, torch.rand(1))


def test_tied_weights_are_one_parameter():
    tied, plain = (
        language_model(NUM_WORDS, width=4, hidden=4, ties_weights=ties, seed=0)
        for ties in (True, False)
    )

    difference = sum(p.numel() for p in plain.parameters()) - sum(
        p.numel() for p in tied.parameters()
    )
    assert difference == 4 * NUM_WORDS
    with pytest.raises(ValueError, match="width is 3 and hidden 4"):
        language_model(NUM_WORDS, width=3, hidden=4, ties_weights=True, seed=0)


@pytest.mark.parametrize("ties_weights", [False, True])
def test_engines_agree_on_a_language_model(ties_weights):
    clients = counting_clients(3)
    model = language_model(
        NUM_WORDS, width=6, hidden=6, dropout=0.2, ties_weights=ties_weights, seed=0
    )
    training = fb.LocalTraining(optimizer=fb.sgd(1.0), epochs=1, batch_size=20)

    runs = [
        fb.fedavg(model, clients, rounds=2, training=training, engine=engine, device="cpu")
        for engine in ("reference", "vectorised")
    ]

    assert [run.engine.name for run in runs] == ["reference", "vectorised"]
    for client_id in clients:
        reference, vectorised = (run.evaluation[client_id]["loss"] for run in runs)
        assert vectorised == pytest.approx(reference, rel=1e-4)


def test_a_model_for_each_group_learns_what_one_for_all_cannot_know():
    clients = counting_clients(4)
    model = language_model(NUM_WORDS, width=8, hidden=12, seed=0)
    settings = {
        "rounds": 8,
        "training": fb.LocalTraining(optimizer=fb.adam(0.02), epochs=3, batch_size=20),
        "evaluate_every": 8,
        "device": "cpu",
    }

    plain, oracle = (method(model, clients, **settings) for method in (fb.fedavg, fb.oracle))

    assert math.exp(oracle.overall_mean["loss"]) < 0.8 * math.exp(plain.overall_mean["loss"])
