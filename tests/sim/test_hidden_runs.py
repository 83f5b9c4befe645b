"""Hidden runs: the same decisions and models, though the server knows hidden numbers only."""

from dataclasses import replace

import numpy as np
import pytest

import fedbranch as fb
from fedbranch.privacy import Privacy, Secret, Transform
from sim.hidden_runs import (
    JOINS,
    NEWCOMER,
    PERMUTATION,
    ROTATION,
    RULES,
    SECRET,
    decisions,
    largest_difference,
    moves,
    plain_run,
    simulate,
)

CASES = [("smooth", "thresholds"), ("smooth", "auto"), ("BatchNorm", "auto")]


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(("model", "rule"), CASES)
def test_a_permutation_changes_no_bit_of_any_model(model, rule, engine):
    plain = plain_run(model, rule, engine)

    hidden = simulate(PERMUTATION, model=model, rule=rule, engine=engine)

    assert hidden.engine.name == engine
    assert len(plain.clusters) == 2
    assert (JOINS, NEWCOMER, 0) in [move[:3] for move in moves(plain)]
    assert decisions(hidden) == decisions(plain)
    assert moves(hidden) == moves(plain)
    assert hidden.clusters == plain.clusters
    assert hidden.evaluation == plain.evaluation
    for node in plain.tree:
        ours = hidden.model_at(node.id).state_dict()
        for name, value in plain.model_at(node.id).state_dict().items():
            assert ours[name].numpy().tobytes() == value.numpy().tobytes()
        assert not np.array_equal(hidden.tree[node.id].params, node.params)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(("model", "rule"), CASES)
def test_a_rotation_leads_to_the_same_decisions_and_models(model, rule, engine):
    plain = plain_run(model, rule, engine)

    hidden = simulate(ROTATION, model=model, rule=rule, engine=engine)

    assert decisions(hidden) == decisions(plain)
    assert moves(hidden) == moves(plain)
    assert hidden.clusters == plain.clusters
    # Hiding rounds a model's last digits. With relu, training may amplify that: an activation
    # near zero has a gradient in one run and none in the other.
    assert largest_difference(hidden, plain) < (1e-6 if model == "smooth" else 1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_server_makes_the_same_models_of_rotated_updates(rule):
    """Repeat all rounds of a run with the same updates, so that training amplifies no rounding."""
    sent = {}

    def noted(client_id, this_round, update):
        sent.setdefault(this_round, {})[client_id] = update
        return update

    plain = simulate(rule=rule, before_send=noted)
    num_params = plain.tree.num_params
    transform = Transform.of(SECRET, "rotation", num_params=num_params).params
    server = fb.Server(transform.num_hidden, rule=RULES[rule])
    again = fb.Server(num_params, rule=RULES[rule])  # it gets no losses, as they were not recorded
    for _, updates in sorted(sent.items()):
        for one in (server, again):
            one.plan(updates)
        again.step({i: replace(u, base=None) for i, u in updates.items()})
        server.step(
            {
                i: replace(
                    u,
                    base=None,
                    vector=transform.hide(u.vector),
                    half_difference=None
                    if u.half_difference is None
                    else transform.hide(u.half_difference),
                )
                for i, u in updates.items()
            }
        )

    assert server.clusters == again.clusters
    for node in again.tree:
        revealed = transform.reveal(server.tree[node.id].params)
        np.testing.assert_allclose(revealed, node.params, rtol=0, atol=1e-6)


def test_workers_and_measurements_after_them_are_those_of_the_plain_run():
    plain, hidden = (
        simulate(p, rule="auto", engine="workers", num_workers=2, rounds=12, evaluate_every=12)
        for p in (None, PERMUTATION)
    )

    assert hidden.engine.name == "workers"
    assert decisions(hidden) == decisions(plain)
    assert largest_difference(hidden, plain) == 0
    assert hidden.evaluation_on_path() == plain.evaluation_on_path()
    assert hidden.ensemble_evaluation() == plain.ensemble_evaluation()


@pytest.mark.parametrize("method", [fb.fedavg, fb.local, fb.oracle, fb.ifca])
@pytest.mark.parametrize("privacy", [PERMUTATION, ROTATION], ids=["permutation", "rotation"])
def test_the_baselines_hide_models_and_replies(method, privacy):
    settings = {"method": method, "rounds": 3, "evaluate_every": 3, "engine": "reference"}
    if method is fb.ifca:
        settings["num_clusters"] = 2

    in_place = replace(
        privacy, transform=None
    )  # the further models of ifca start as in the hidden run
    plain = simulate(in_place if method is fb.ifca else None, **settings)

    hidden = simulate(privacy, **settings)

    assert hidden.clusters == plain.clusters
    assert largest_difference(hidden, plain) <= (0 if privacy is PERMUTATION else 1e-6)
    if method is fb.ifca:  # the start of the second model is hidden, too
        starts = [node for node in plain.tree.leaves if node.params.any()]
        assert starts
        assert not any(np.array_equal(n.params, hidden.tree[n.id].params) for n in starts)


def test_no_model_that_follows_from_the_public_seed_is_sent_hidden(monkeypatch):
    given = []
    partition = fb.Server.partition

    def noted(server, clusters, starts=None):
        given.append(starts)
        return partition(server, clusters, starts)

    monkeypatch.setattr(fb.Server, "partition", noted)
    other = Privacy(Secret(bytes(32), "tests"), transform="permutation")
    for privacy in (None, PERMUTATION, PERMUTATION, other):
        simulate(privacy, method=fb.ifca, num_clusters=3, rounds=1, engine="reference")

    # A permutation keeps the numbers, so they are compared in ascending order.
    public, hidden, again, of_other = (
        {np.sort(start).tobytes() for start in starts.values()} for starts in given
    )
    assert [len(starts) for starts in (public, hidden)] == [2, 2]
    assert hidden == again
    assert not hidden & public
    assert not hidden & of_other


def test_gradients_are_hidden_like_updates():
    training = fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=2, batch_size=36, send_gradient=True)
    plain, hidden = (
        simulate(p, rule="auto", training=training, rounds=12) for p in (None, PERMUTATION)
    )

    assert decisions(hidden) == decisions(plain)
    assert largest_difference(hidden, plain) == 0


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_before_send_sees_plain_updates(engine):
    def of_run(privacy):
        seen = []

        def noted(client_id, this_round, update):
            seen.append((client_id, this_round, update.vector.tobytes()))
            return update

        simulate(privacy, before_send=noted, rounds=2, engine=engine)
        return seen

    assert of_run(PERMUTATION) == of_run(None)
