"""Clients join, leave, and are away."""

import pytest

from fakes import QuadraticClients, fingerprint
from fedbranch import NeverSplit, Server
from server.made_servers import THRESHOLDS, play_present, server_for


def test_clients_that_leave_do_not_keep_the_others_from_their_groups():
    clients = QuadraticClients(num_groups=4, clients_per_group=5)
    server = server_for(clients)
    present = list(clients.client_ids)
    for number in range(60):
        if number % 6 == 5:
            server.remove([present.pop(number % len(present))])
        record = clients.play_round(server, present)
        if number % 6 == 5:
            assert len(record.left) == 1

    assert server.tree.client_ids == sorted(present)
    assert clients.are_separated(server)


def test_no_client_is_removed_if_one_of_those_named_cannot_be():
    server = Server(1, rule=NeverSplit())
    server.plan(["a", "b"])

    for ids in (["a", "ghost"], ["a", "a", "b"]):
        with pytest.raises(ValueError, match=r"not known|more than once"):
            server.remove(ids)
    assert server.tree.client_ids == ["a", "b"]


@pytest.mark.parametrize(
    ("client_ids", "error", "message"),
    [
        ("abc", TypeError, "pass a list"),
        ([1, 2], TypeError, "non-empty strings"),
        ([""], TypeError, "non-empty strings"),
        (["a", "b", "a"], ValueError, r"\['a'\] are named more than once"),
        (["\ud83d"], ValueError, "not valid Unicode"),
    ],
)
def test_bad_client_ids_are_named(client_ids, error, message):
    with pytest.raises(error, match=message):
        Server(1, rule=NeverSplit()).plan(client_ids)


@pytest.mark.parametrize("call", ["remove", "reroute"])
def test_unknown_clients_are_named(call):
    server = Server(1, rule=NeverSplit())
    with pytest.raises(ValueError, match=r"\['ghost'\] are not known"):
        getattr(server, call)(["ghost"])
    with pytest.raises(TypeError, match="pass a list"):
        getattr(server, call)("ghost")


def test_a_split_does_not_wait_for_a_client_that_is_away():
    clients = QuadraticClients(2, 3)
    gone, *present = clients.client_ids
    waiting, knowing = (server_for(clients, THRESHOLDS) for _ in range(2))  # want to hear all
    for server in (waiting, knowing):
        clients.play_round(server, clients.client_ids)

    for _ in range(60):
        clients.play_round(waiting, present)
    play_present(clients, knowing, present, rounds=60)

    assert len(waiting.clusters) == 1
    assert len(knowing.clusters) == 2
    assert knowing.tree.position(gone) == knowing.tree.root.id  # and is routed when it returns
    play_present(clients, knowing, clients.client_ids, rounds=2)
    assert clients.are_separated(knowing)


def test_members_are_counted_out_after_ten_rounds_and_in_at_once():
    clients = QuadraticClients(2, 3)
    server = server_for(clients, NeverSplit())
    server.join(clients.client_ids)

    def counted(present):
        record = play_present(clients, server, present)
        return record.decisions[0].measurements["num_members"]

    assert counted(clients.client_ids) == 6
    assert [counted(clients.client_ids[2:]) for _ in range(12)] == [6] * 9 + [4] * 3
    assert counted(clients.client_ids[1:]) == 5


def test_a_client_that_is_there_but_not_asked_is_not_away():
    clients = QuadraticClients(2, 3)
    server = server_for(clients, NeverSplit())
    server.join(clients.client_ids)

    for _ in range(30):
        server.mark_present(clients.client_ids)
        record = clients.play_round(server, clients.client_ids[:2])

    assert record.decisions[0].measurements["num_members"] == 6


def test_which_clients_are_away_survives_saving(tmp_path):
    clients = QuadraticClients(2, 3)
    server = server_for(clients, NeverSplit())
    server.join(clients.client_ids)
    play_present(clients, server, clients.client_ids[2:], rounds=7)
    server.save(tmp_path)

    resumed = Server.load(tmp_path)

    for one in (server, resumed):
        record = play_present(clients, one, clients.client_ids[2:], rounds=4)
        assert record.decisions[0].measurements["num_members"] == 4
    assert fingerprint(server) == fingerprint(resumed)


def test_unknown_clients_cannot_be_present():
    with pytest.raises(ValueError, match="not known"):
        Server(1, rule=NeverSplit()).mark_present(["stranger"])


@pytest.mark.parametrize(
    ("client_id", "problem"),
    [
        ("a ", "begins or ends with a blank"),
        ("\ta", "cannot be seen"),
        ("a\u200b", "cannot be seen"),
        ("a\x1b[2J", "cannot be seen"),
        ("x" * 1001, "has 1001 characters; use at most 1000"),
    ],
)
def test_an_id_that_looks_like_another_is_named(client_id, problem):
    with pytest.raises(ValueError, match=problem):
        Server(1, rule=NeverSplit()).plan(["a", client_id])
