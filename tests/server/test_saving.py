"""A saved server goes on as if it had not been interrupted."""

import numpy as np
import pytest

from fakes import QuadraticClients, fingerprint
from fedbranch import DamagedFile, NeverSplit, Server, Thresholds, Update
from rules.bowls import Bowls
from server.made_servers import holding_server, server_for
from server.replies.made_replies import (
    DIM,
    SETTINGS,
    SIZE,
    filled,
    similar_updates,
    state_of,
    updates_of,
)


@pytest.mark.parametrize("stop", [1, 7, 12, 13, 14, 15, 16, 30])
def test_a_loaded_server_goes_on_as_if_nothing_had_happened(tmp_path, stop):
    def play(server, clients, first, last):
        for number in range(first, last):
            rng = np.random.default_rng(number)
            asked = [str(i) for i in sorted(rng.choice(clients.client_ids, 8, replace=False))]
            clients.play_round(server, asked)

    clients = QuadraticClients(num_groups=3, clients_per_group=4)
    undisturbed = server_for(clients)
    play(undisturbed, clients, 0, 40)
    interrupted = server_for(clients)
    play(interrupted, clients, 0, stop)
    interrupted.save(tmp_path)

    resumed = Server.load(tmp_path)

    assert fingerprint(resumed) == fingerprint(interrupted)
    play(resumed, clients, stop, 40)
    assert fingerprint(resumed) == fingerprint(undisturbed)


def test_a_reply_from_before_a_restart_is_refused_if_the_parameters_went_another_way(tmp_path):
    server = Server(1, rule=NeverSplit())
    server.plan(["a", "b", "c"])
    server.save(tmp_path)
    server.step({"a": Update(np.float32([1]), 1)})
    before_the_crash = server.plan(["c"])["c"].base

    restarted = Server.load(tmp_path)
    restarted.step({"b": Update(np.float32([-50]), 1)})
    record = restarted.step({"c": Update(np.float32([1]), 1, base=before_the_crash)})

    assert "computed at other parameters" in record.refused["c"]


def held_files(folder):
    return {path.name.rsplit("-", 1)[0]: path.stat().st_ino for path in folder.glob("held-*")}


def test_replies_that_are_held_are_written_once(tmp_path):
    holding_server(3, tmp_path)
    before = held_files(tmp_path)
    server = Server.load(tmp_path)
    server.plan(["c6"])
    server.step({"c6": Update(np.float32([-1, 0.25]), 1)})

    server.save(tmp_path)

    after = held_files(tmp_path)
    assert {"held-0-1", "held-0-2", "held-0-3"} == before.keys()
    assert after.keys() == before.keys() | {"held-0-4"}
    assert all(after[name] == before[name] for name in before)


def test_the_times_of_saving_do_not_show_in_the_held_replies(tmp_path):
    often, once = holding_server(4, tmp_path / "often"), holding_server(4)
    for server in (often, once):
        server.remove(["c2", "c4", "c5"])
    often.save(tmp_path / "often")

    loaded = Server.load(tmp_path / "often")

    assert fingerprint(often) == fingerprint(once) == fingerprint(loaded)
    state, files = once.to_state()
    assert [list(held) for held in state["cases"]["0"]["held"].values()] == [
        ["c0", "c1"],
        ["c3"],
        ["c6", "c7"],
    ]
    assert files["held-0-2"]["vector"].tolist() == [[1, 0.25]]


@pytest.mark.parametrize(
    "edit",
    [
        lambda held, _: held.update({"3": held["1"]}),
        lambda held, _: held.update({"2": held["1"]}),
        lambda held, _: held.update({"x": held.pop("1")}),
        lambda held, _: held.update({"1": {}}),
        lambda held, _: held["1"].update(c9=held["1"]["c0"]),
        lambda held, _: held["1"].update(c0=None),
        lambda held, _: held.update({"1": None}),
        lambda _, files: files.pop("held-0-1"),
        lambda _, files: files.update({"held-0-1": {}}),
        lambda _, files: files.update({"held-0-1": {"vector": np.ones((2, 2))}}),
        lambda _, files: files.update({"held-0-1": {"vector": np.float32(1)}}),
    ],
)
def test_impossible_held_replies_are_refused(edit):
    state, files = holding_server(2).to_state()
    edit(state["cases"]["0"]["held"], files)

    with pytest.raises(DamagedFile, match="contradicts itself"):
        Server.from_state(state, files)


def test_numbers_of_other_libraries_can_be_saved(tmp_path):
    rule = Thresholds(
        eps_mean=np.float32(0.5), eps_max=1, gamma_max=0.5, min_cluster_size=np.int64(2)
    )
    server = Server(np.prod((2, 3)), rule=rule, max_examples=np.int64(50))

    server.save(tmp_path)

    assert Server.load(tmp_path).options.rule == rule


def test_a_described_state_does_not_change_afterwards():
    server = Server(1, rule=NeverSplit())
    server.partition({"left": ["a"], "right": ["b"]})
    state, files = server.to_state()

    server.undo_split(0)
    server.tree.advance(0, np.float32([5]))

    assert Server.from_state(state, files).tree.root.params.tolist() == [0]


@pytest.mark.parametrize("name", ["sketched and kept", "summed", "summed, with signals"])
@pytest.mark.parametrize("saved_after", range(5))
def test_a_server_that_is_saved_in_the_middle_goes_on_as_if_it_was_not(name, saved_after, tmp_path):
    settings = SETTINGS[name]
    num_signal = settings.get("num_signal")
    rule = Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99, coverage=0.9, max_hold_rounds=3)

    def rounds(server, numbers):
        for number in numbers:
            updates = updates_of(30, number, num_signal=num_signal)
            # A third of the clients answer in each round, so the cluster stands still for three rounds.
            present = [i for i in updates if int(i[1:]) % 3 == number % 3]
            tasks = server.plan(present)
            server.step(filled(server, {i: updates[i] for i in tasks}, seed=number))
        return server

    uninterrupted = rounds(Server(DIM, rule=rule, **settings), range(6))
    interrupted = rounds(Server(DIM, rule=rule, **settings), range(saved_after))
    interrupted.save(tmp_path)
    again = Server.load(tmp_path)

    assert state_of(again) == state_of(interrupted)
    assert state_of(rounds(again, range(saved_after, 6))) == state_of(uninterrupted)


def test_a_server_with_tiny_claimed_weights_can_be_saved_and_read(tmp_path):
    rule = Thresholds(eps_mean=1e9, eps_max=1e-9, gamma_max=0.1, coverage=1.0)
    server = Server(DIM, rule=rule, sketch=SIZE, keep_updates=False)
    updates = similar_updates(8, 0, size=1e-3)
    server.plan([*updates, "awaited"])
    claimed = {i: Update(u.vector, num_examples=1e-9) for i, u in updates.items()}
    server.step(updates | {"c000": claimed["c000"]})

    server.save(tmp_path)

    assert state_of(Server.load(tmp_path)) == state_of(server)


def test_losses_may_be_asked_for_in_parts_and_survive_a_checkpoint(tmp_path):
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(2)
    ids = sorted(bowls.rows)
    server.plan(ids)
    trials = server.trials(ids[:5]) | server.trials(ids[5:])
    server.save(tmp_path)

    loaded = Server.load(tmp_path)
    record = loaded.step({}, losses={i: bowls.losses(i, own) for i, own in trials.items()})

    assert record.refused == {}
    assert record.splits


def test_half_differences_of_some_survive_a_checkpoint(tmp_path):
    bowls = Bowls("ab" * 8)
    bowls.cannot_halve = {"c01"}
    server, _ = bowls.run(2)
    server.save(tmp_path)

    loaded = Server.load(tmp_path)

    before, after = server.to_state(), loaded.to_state()
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, tensors in before[1].items():
        for key, tensor in tensors.items():
            assert np.array_equal(tensor, after[1][name][key])
    assert loaded.trials(["c00"])["c00"][0].on == "second half"


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 7])
def test_a_server_saved_in_the_middle_of_an_examination_goes_on_to_the_same_bits(
    tmp_path, num_rounds
):
    whole, _ = Bowls("abc" * 5).run(12)
    begun, _ = Bowls("abc" * 5).run(num_rounds)
    begun.save(tmp_path)

    resumed, _ = Bowls("abc" * 5).run(12 - num_rounds, server=Server.load(tmp_path))

    assert resumed.clusters == whole.clusters
    for one, other in zip(resumed.tree, whole.tree, strict=True):
        assert np.array_equal(one.params, other.params)
    assert resumed.to_state()[0] == whole.to_state()[0]
