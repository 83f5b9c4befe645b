"""Clients measure their losses under models, and bad losses cost nothing else."""

import numpy as np
import pytest

from fedbranch import AutoRule, Server
from fedbranch.server.state import OnTrial
from rules.bowls import DIM, Bowls
from server.replies.made_replies import planted


def test_bad_losses_are_refused_alone():
    bowls = Bowls("ab" * 6)
    server, _ = bowls.run(2)
    ids = sorted(bowls.rows)
    server.plan(ids)
    trials = server.trials(ids)
    losses = {i: bowls.losses(i, own) for i, own in trials.items()}
    losses |= {"c00": [1.0], "c01": "losses", "c02": [None, 1.0, 2.0, 3.0], "stranger": [1.0]}

    record = server.step({}, losses=losses)

    assert set(record.refused) == {"c00", "c01", "c02", "stranger"}
    assert "send 4 numbers" in record.refused["c00"]
    assert "was not asked for any" in record.refused["stranger"]


def test_bad_losses_do_not_take_the_update_with_them():
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(4)
    ids = sorted(bowls.rows)
    tasks, trials = server.plan(ids), server.trials(ids)
    losses = {i: np.array(bowls.losses(i, own)) for i, own in trials.items()}
    assert "c00" in losses
    losses["c00"] = [1.0]

    record = server.step({i: bowls.update(i, t) for i, t in tasks.items()}, losses=losses)

    assert set(record.refused) == {"c00"}
    assert set(record.metrics) == set(ids)


@pytest.mark.parametrize("num_rounds", [4, 5])
def test_losses_asked_for_below_an_undone_split_are_refused(num_rounds):
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(num_rounds)
    ids = sorted(bowls.rows)
    server.plan(ids)
    server.trials(ids)
    server.state.on_trial["c00"] = OnTrial(
        server.tree.position("c00"), 4, ()
    )  # as a proposal there would
    server.undo_split(0)

    record = server.step({}, losses={i: [1.0] * 4 for i in ids})

    assert set(record.refused) == set(ids)


def test_losses_for_clusters_that_are_gone_are_refused():
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(4)
    ids = sorted(bowls.rows)
    server.plan(ids)
    trials = server.trials(ids)
    assert trials
    server.merge_split(0)

    record = server.step({}, losses={i: bowls.losses(i, own) for i, own in trials.items()})

    assert len(record.refused) == len(ids)


def test_signals_are_compared_and_updates_tried():
    bowls = Bowls("ab" * 8)
    bowls.sends_signal = True

    server, _ = bowls.run(4, server=Server(DIM, compare="signal"))

    assert bowls.found(server)


def test_losses_under_an_impossible_id_are_refused():
    server = Server(1)
    server.plan(["a"])

    record = server.step({}, losses={3: [1.0], "b": [1.0]})

    assert set(record.refused) == {"3", "b"}
    with pytest.raises(TypeError, match="losses is a list; pass a mapping"):
        server.step({}, losses=[1.0])


def test_no_client_is_asked_to_measure_models_that_cannot_be_made():
    dim = 2000
    ids, _, updates = planted(20, 2, dim, 0.5, seed=3)
    server = Server(dim, sketch=512, keep_updates=False, rule=AutoRule(review_after=()))
    verdicts = []
    for number in range(6):
        tasks = server.plan(ids)
        assert server.trials(ids) == {}
        record = server.step(updates(tasks, number, True))
        verdicts += [decision.verdict for decision in record.decisions]

    assert "hold" not in verdicts  # and the cluster does not stand still for it
    assert len(server.clusters) == 2
