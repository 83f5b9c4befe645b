"""Runs in which clients add noise to their replies."""

import numpy as np
import pytest
from torch import nn

import fedbranch as fb
from fakes import fingerprint
from fedbranch.privacy import Noise, Privacy
from fedbranch.server.options import ServerOptions
from fedbranch.sim.clients import SimulatedClients
from sim.hidden_runs import MODELS, NEWCOMER, NOISE, ROTATION, SECRET, clients, simulate


def test_noise_is_seeded_and_no_metrics_are_sent():
    privacy = Privacy(SECRET, noise=NOISE)

    runs = [simulate(privacy, rounds=3, engine=e, seed=s) for e, s in
            [("reference", 5), ("reference", 5), ("reference", 6)]]  # fmt: skip

    first, again, other = (fingerprint(run.server) for run in runs)
    assert first == again != other
    for entry in runs[0].history:
        assert all(metrics == {} for metrics in entry.record.metrics.values())


def test_every_client_draws_noise_of_its_own_in_every_round():
    sent = []

    def noted(client_id, this_round, update):
        sent.append(update.vector)
        return update

    # The noise is so large that it outweighs the updates.
    simulate(Privacy(SECRET, noise=Noise(clip=1e-3, multiplier=1e3)), before_send=noted, rounds=2)

    similarity = fb.cosine_similarity(np.stack(sent))
    assert len(sent) == 16
    assert np.abs(similarity - np.eye(16)).max() < 0.25  # for independent vectors about 0.03


def test_noise_comes_before_before_send():
    seen = []

    def noted(client_id, this_round, update):
        seen.append(update)
        return update

    simulate(Privacy(SECRET, noise=Noise(clip=0.5, multiplier=0)), before_send=noted, rounds=2)

    assert len(seen) == 16
    for update in seen:
        assert np.linalg.norm(update.vector) < 0.5 * (1 + 1e-5)
        assert update.metrics == {}


def test_noise_without_a_transform_leaves_the_coordinates_in_place():
    settings = {"rounds": 2, "engine": "reference"}
    no_noise = Noise(clip=1e6, multiplier=0)

    plain = simulate(None, **settings)
    clipped = simulate(Privacy(SECRET, transform=None, noise=no_noise), **settings)

    np.testing.assert_allclose(clipped.tree.root.params, plain.tree.root.params, atol=1e-6)


def test_with_noise_no_client_answers_trials():
    privacy = Privacy(SECRET, noise=NOISE)
    simulated = SimulatedClients(
        MODELS["smooth"](), clients(), fb.LocalTraining(epochs=1), seed=0, device="cpu",
        engine="reference", privacy=privacy,
    )  # fmt: skip
    server = simulated.server_for(ServerOptions(rule=fb.NeverSplit(), weighting="equal"))
    node = server.tree.root
    trial = fb.Trial(params=node.params, buffers=node.buffers)

    assert simulated.losses({"client-0": (trial,)}) == {}


def test_every_update_costs_privacy_and_halves_cost_twice():
    privacy = Privacy(SECRET, noise=NOISE)
    num_halves = {}

    def noted(client_id, this_round, update):
        num_halves.setdefault(client_id, []).append(1 + (update.half_difference is not None))
        return update

    run = simulate(privacy, rule="auto", before_send=noted)

    counts = {client_id: sum(sent) for client_id, sent in num_halves.items()}
    assert set(counts) == set(clients())
    assert max(max(sent) for sent in num_halves.values()) == 2
    assert counts[NEWCOMER] < min(n for i, n in counts.items() if i != NEWCOMER)
    assert run.epsilons(1e-5) == {i: NOISE.epsilon(n, 1e-5) for i, n in counts.items()}


def test_whether_there_are_halves_does_not_depend_on_the_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 24, 6)).astype(np.float32)
    y = rng.integers(2, size=(6, 24))
    x[0] = 0  # a model without a bias learns nothing from zeros: both halves' updates are 0
    data = {f"client-{i}": fb.ClientData((x[i], y[i]), None) for i in range(5)}
    data["few"] = fb.ClientData((x[5, :3], y[5, :3]), None)  # too few examples for halves

    model = nn.Linear(6, 2, bias=False)
    nn.init.zeros_(model.weight)

    def of_run(engine):
        has_halves = {}

        def noted(client_id, this_round, update):
            has_halves[this_round, client_id] = update.half_difference is not None
            return update

        run = fb.simulate(
            model, data, rounds=3, engine=engine, before_send=noted,
            privacy=Privacy(SECRET, transform=None, noise=Noise(clip=1.0, multiplier=8.0)),
        )  # fmt: skip
        assert run.engine.name == engine
        return has_halves, run.epsilons(1e-5)

    has_halves, epsilons = of_run("vectorised")

    assert (has_halves, epsilons) == of_run("reference")
    assert has_halves[2, "client-0"]
    assert has_halves[2, "client-1"]
    assert not has_halves[2, "few"]
    assert epsilons["client-0"] == epsilons["client-1"] > epsilons["few"]


def test_without_noise_there_is_no_epsilon():
    with pytest.raises(ValueError, match=r"had no noise.*Noise\(clip=..., multiplier=...\)"):
        simulate(ROTATION, rounds=1).epsilons(1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "BatchNorm"}, "the model has 25 buffers.*GroupNorm"),
        ({"training": fb.LocalTraining(epochs=1, send_gradient=True)}, "send_gradient"),
        ({"method": fb.ifca, "num_clusters": 2}, "which model a client chooses"),
    ],
)
def test_what_noise_does_not_cover_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        simulate(Privacy(SECRET, noise=NOISE), rounds=1, **settings)
