"""The hook ``before_send``: what clients do to their replies before they send them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fakes import fingerprint
from sim.two_groups import RULE, TRAINING, make_clients, make_model, simulate

ENGINES = ["reference", "workers", "vectorised"]


def unchanged(client_id, this_round, update):
    return update


class Noted:
    """A before_send that records every reply and changes nothing."""

    def __init__(self):
        self.replies = []

    def __call__(self, client_id, this_round, update):
        self.replies.append((client_id, this_round, update))
        return update


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", [RULE, fb.AutoRule()], ids=["thresholds", "auto"])
def test_a_before_send_that_changes_nothing_changes_no_bit(engine, rule):
    settings = {"engine": engine, "rule": rule, "rounds": 20}

    with_hook, without = simulate(before_send=unchanged, **settings), simulate(**settings)

    assert with_hook.engine.name == engine
    assert len(with_hook.clusters) == 2
    assert fingerprint(with_hook.server) == fingerprint(without.server)
    assert with_hook.history == without.history


@pytest.mark.parametrize("engine", ENGINES)
def test_before_send_sees_every_reply_in_the_order_of_clients(engine):
    noted = Noted()

    run = simulate(before_send=noted, engine=engine, rounds=4, participation=0.5)

    seen = [(this_round, client_id) for client_id, this_round, _ in noted.replies]
    assert seen == [(e.record.round, i) for e in run.history for i in sorted(e.record.metrics)]
    for client_id, this_round, update in noted.replies:
        assert isinstance(update.vector, np.ndarray)
        assert update.num_examples == 40
        assert update.metrics == run.history[this_round - 1].record.metrics[client_id]


@pytest.mark.parametrize("engine", ENGINES)
def test_before_send_sees_buffers_signals_and_halves(engine):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    clients = make_clients()
    few = clients["c0"].train
    clients["few"] = fb.ClientData((few.x[:3], few.y[:3]))  # too few examples for halves
    noted = Noted()

    fb.simulate(
        model,
        clients,
        rounds=2,
        training=fb.LocalTraining(epochs=1, batch_size=10, send_gradient=True),
        engine=engine,
        before_send=noted,
    )

    has_halves = {
        (this_round, client_id)
        for client_id, this_round, update in noted.replies
        if update.half_difference is not None
    }
    assert has_halves == {(2, f"c{i}") for i in range(6)}  # the first examination
    for _, _, update in noted.replies:
        assert update.buffers.shape == (17,)
        assert update.signal.shape == update.vector.shape


@pytest.mark.parametrize("engine", ENGINES)
def test_the_server_gets_what_before_send_returns(engine):
    def without_first_layer(client_id, this_round, update):
        vector = update.vector.copy()
        vector[:24] = 0
        return replace(update, vector=vector)

    run = simulate(before_send=without_first_layer, engine=engine, rule=fb.NeverSplit(), rounds=3)

    assert not run.tree.root.params[:24].any()
    assert run.tree.root.params[24:].all()


def test_clients_that_send_the_opposite_are_found():
    def opposite(client_id, this_round, update):
        return replace(update, vector=-update.vector) if client_id in ("c2", "c6") else update

    of_one_group = {i: client for i, client in make_clients(10).items() if client.group == "0"}

    run = simulate(of_one_group, before_send=opposite)

    assert sorted(run.clusters.values()) == [["c0", "c4", "c8"], ["c2", "c6"]]


def test_a_reply_that_is_no_update_is_refused_like_any_bad_reply():
    def silent_once(client_id, this_round, update):
        return None if (client_id, this_round) == ("c2", 2) else update

    run = simulate(before_send=silent_once, rounds=3)

    assert [sorted(entry.record.refused) for entry in run.history] == [[], ["c2"], []]
    assert "the reply is a NoneType" in run.history[1].record.refused["c2"]


@pytest.mark.parametrize("method", [fb.fedavg, fb.local, fb.oracle, fb.ifca])
def test_the_baselines_call_before_send(method):
    noted = Noted()
    more = {"num_clusters": 2} if method is fb.ifca else {}

    method(make_model(), make_clients(), rounds=2, training=TRAINING, before_send=noted, **more)

    assert len(noted.replies) == 12


def test_a_resumed_run_must_send_in_the_same_way(tmp_path):
    simulate(folder=tmp_path, rounds=3, before_send=unchanged)

    with pytest.raises(fb.UnusableRun, match="its before_send is not the one given now"):
        simulate(folder=tmp_path, rounds=3, resume=True)
    run = simulate(folder=tmp_path, rounds=3, resume=True, before_send=unchanged)
    assert len(run.history) == 3
