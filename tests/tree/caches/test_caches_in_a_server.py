"""A server finds the same clusters whatever its edges keep."""

import numpy as np
import pytest

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import InMemory, Server, Sketched, Thresholds
from fedbranch.rules.credibility import opposed_moves
from fedbranch.tree import make_edge
from tree.made_edges import KINDS, caches, planted


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["sketches", "disk"])
def test_a_server_finds_and_fills_the_same_clusters_whatever_edges_keep(kind, seed, tmp_path):
    def played(cache):
        clients = QuadraticClients(3, 5, seed=seed)
        rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5)
        server = Server(DIM, rule=rule, cache=cache)
        late = clients.client_ids[-4:]
        for number in range(45):
            there = clients.client_ids if number >= 35 else clients.client_ids[:-4]
            clients.play_round(server, there)
        assert clients.are_separated(server)
        assert any(server.tree.position(i) for i in late)
        return server

    # Of 20 numbers a sketch keeps 16: hardly fewer, and hardly the same similarities.
    cache = Sketched(size=16, seed=seed) if kind == "sketches" else caches(tmp_path)[kind]
    assert played(cache).clusters == played(InMemory()).clusters


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_pointed_away_are_known_whatever_edges_keep(kind, tmp_path):
    groups, pulls, _ = planted(3, num_groups=1)
    groups.append({f"1-{n}": -update for n, update in enumerate(groups[0].values())})
    groups[0]["0-0"] = -pulls[0]  # belongs to the others
    cache = caches(tmp_path)[kind]

    opposed = opposed_moves({7 + n: make_edge(cache, group) for n, group in enumerate(groups)})

    assert opposed["0-0"] == frozenset()
    assert all(opposed[i] == {7} for i in groups[1])
    assert all(opposed[i] == {8} for i in groups[0] if i != "0-0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [1, 12, 14, 16, 30])
def test_a_server_goes_on_to_the_same_bytes_after_loading(kind, stop, tmp_path):
    def play(server, clients, first, last):
        for number in range(first, last):
            rng = np.random.default_rng(number)
            asked = [str(i) for i in sorted(rng.choice(clients.client_ids, 8, replace=False))]
            clients.play_round(server, asked)

    def new(name):
        cache = {**caches(tmp_path / name), "sketches": Sketched(size=16)}[kind]
        rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=1.0)
        return QuadraticClients(3, 4), Server(DIM, rule=rule, cache=cache)

    clients, undisturbed = new("a")
    play(undisturbed, clients, 0, 40)
    _, server = new("b")
    play(server, clients, 0, stop)
    server.save(tmp_path / "saved")

    loaded = Server.load(tmp_path / "saved")
    play(loaded, clients, stop, 40)
    loaded.save(tmp_path / "saved")

    assert len(undisturbed.tree) > 1
    assert fingerprint(loaded) == fingerprint(undisturbed)
    assert fingerprint(Server.load(tmp_path / "saved")) == fingerprint(undisturbed)
