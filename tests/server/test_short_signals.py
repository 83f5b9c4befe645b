"""Signals that are shorter than the updates: clusters are found by them, models trained by updates."""

import numpy as np
import pytest

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import DamagedFile, Server
from server.made_servers import server_for, sketched


def test_clusters_are_found_and_newcomers_routed_by_short_signals():
    clients, server = sketched()
    late = clients.client_ids[-1]
    for _ in range(40):
        clients.play_round(server, [i for i in clients.client_ids if i != late])
    for _ in range(4):
        clients.play_round(server, clients.client_ids)

    assert clients.are_separated(server)
    cached = {u.shape for node in server.tree for u in node.cached_updates.values()}
    assert cached == {(DIM // 2,)}
    for leaf in server.tree.leaves:  # trained by whole updates
        optima = np.mean([clients.optimum[i] for i in server.tree.members(leaf.id)], axis=0)
        np.testing.assert_allclose(leaf.params, optima, atol=0.05)


@pytest.mark.parametrize("stop", [1, 7, 12, 13, 14, 15, 16, 30])
def test_a_server_that_compares_short_signals_goes_on_after_loading(tmp_path, stop):
    def play(server, clients, first, last):
        for number in range(first, last):
            rng = np.random.default_rng(number)
            asked = [str(i) for i in sorted(rng.choice(clients.client_ids, 8, replace=False))]
            clients.play_round(server, asked)

    clients, undisturbed = sketched()
    play(undisturbed, clients, 0, 40)
    _, interrupted = sketched()
    play(interrupted, clients, 0, stop)
    interrupted.save(tmp_path)

    resumed = Server.load(tmp_path)

    assert resumed.num_signal == DIM // 2
    play(resumed, clients, stop, 40)
    assert fingerprint(resumed) == fingerprint(undisturbed)


def test_a_state_from_before_short_signals_still_loads():
    clients = QuadraticClients(num_groups=2, clients_per_group=3)
    server = server_for(clients)
    for _ in range(20):
        clients.play_round(server, clients.client_ids)
    state, files = server.to_state()
    del state["num_signal"]

    loaded = Server.from_state(state, files)

    assert len(loaded.clusters) == 2
    assert fingerprint(loaded) == fingerprint(server)


def test_cached_signals_of_another_length_are_refused():
    clients, server = sketched(num_groups=2)
    for _ in range(20):
        clients.play_round(server, clients.client_ids)
    state, files = server.to_state()
    assert len(server.clusters) == 2

    with pytest.raises(DamagedFile, match="cached is not 7 long"):
        Server.from_state(state | {"num_signal": 7}, files)


@pytest.mark.parametrize("settings", [{"compare": "signal", "num_signal": 0}, {"num_signal": 5}])
def test_an_impossible_length_of_signals_is_named(settings):
    with pytest.raises(ValueError, match=r"num_signal is \d with compare="):
        Server(10, **settings)
