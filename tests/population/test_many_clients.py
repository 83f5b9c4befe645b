"""Servers with many clients: what a round, a save and a load cost."""

import tracemalloc

import numpy as np

from fedbranch import NeverSplit, ParameterTree, Server, Thresholds
from fedbranch.population.registry import Registry
from population.crowds import Written, crowd, ids_of, make_small, play


def test_no_round_save_or_load_lists_the_members_of_a_cluster(tmp_path, monkeypatch):
    server = crowd(20_000, Thresholds(eps_mean=9, eps_max=0.1, gamma_max=0.5, coverage=0.01))

    def listed(*_):
        raise AssertionError("all members were listed")

    with monkeypatch.context() as patch:
        for name in ("members", "cluster"):
            patch.setattr(ParameterTree, name, listed)
        patch.setattr(ParameterTree, "client_ids", property(listed))
        patch.setattr(Registry, "ids", listed)
        for number in range(3):
            asked = ids_of(20_000)[number::80]
            assert server.awaited(asked) == []
            play(server, asked, number)
            server.save(tmp_path)
        server = Server.load(tmp_path)
        assert len(server.tree) > 1
    server.merge_split(0)  # its record names every client that moves, so it does list them

    assert len(server.tree.client_ids) == 20_000


def test_awaited_among_some_are_those_of_all_awaited():
    holding = Thresholds(eps_mean=9, eps_max=0.1, gamma_max=0.5, coverage=0.9)
    server = crowd(60, holding)
    ids = ids_of(60)
    server.tree.positions.place_all(ids[50:], 0)
    play(server, ids[:20])

    assert server.awaited() == ids[20:]
    assert server.awaited([*ids[10:30], "stranger"]) == ids[20:30]
    for number in range(12):
        play(server, ids[15:40], number)
    assert server.awaited() == server.awaited(ids)
    assert not set(server.awaited()) & set(ids[40:])  # they are away


def test_a_save_writes_what_changed_and_not_all_known_clients(tmp_path, monkeypatch):
    written = Written(monkeypatch)
    rng = np.random.default_rng(0)

    def mean_bytes(number):
        server, ids = crowd(number), ids_of(number)
        folder = tmp_path / str(number)
        counts = []
        for round_number in range(30):
            asked = [ids[i] for i in rng.choice(number, 500, replace=False)]
            play(server, asked, round_number)
            server.tree.split(0, [{}, {}]) if round_number == 0 else None
            server.tree.positions.place_all(asked, 1)
            counts.append(written.by(lambda: server.save(folder)))
        return counts

    few, many = mean_bytes(10_000), mean_bytes(200_000)

    # The ids alone are 2.8 MB, positions and rounds 0.8 MB each. Of 20 times as many clients.
    assert np.median(many) < 150_000
    assert np.mean(many[1:]) < 300_000
    assert np.mean(many[1:]) < 6 * np.mean(few[1:])


def test_newcomers_are_written_about_once_each_level_of_runs(tmp_path, monkeypatch):
    written = Written(monkeypatch)
    server, ids = Server(3, rule=NeverSplit()), ids_of(60_000)

    total = 0
    for start in range(0, len(ids), 1000):
        server.join(ids[start : start + 1000])
        server.step({})
        total += written.by(lambda: server.save(tmp_path))

    assert total < 25 * 40 * len(ids)  # all of them each time would be 30 times 40 bytes each
    assert len(list(tmp_path.glob("clients-*"))) <= 16


def test_a_known_client_takes_tens_of_bytes(tmp_path):
    number = 200_000
    crowd(number).save(tmp_path)
    tracemalloc.start()
    try:
        server = Server.load(tmp_path)
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(server.tree.positions) == number
    assert taken < 50 * number
    assert peak < 120 * number
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 60 * number


def test_the_order_in_which_clients_join_changes_no_byte():
    prints = []
    for seed in range(3):
        server = Server(3, rule=NeverSplit())
        server.plan(np.random.default_rng(seed).permutation(ids_of(9000)).tolist())
        server.step({})
        state, files = server.to_state()
        prints.append(
            (state, {n: {k: v.tobytes() for k, v in t.items()} for n, t in files.items()})
        )

    assert prints[0] == prints[1] == prints[2]


def test_the_times_of_saves_change_no_byte(tmp_path, monkeypatch):
    make_small(monkeypatch)
    often, once = crowd(50), crowd(50)
    for number in range(30):
        asked = ids_of(60)[number : number + 7]
        for server in (often, once):
            play(server, [i for i in asked if i in server.tree], number)
            server.join([f"new-{number}-{i}" for i in range(3)])
            server.remove([f"new-{number}-0"])
        often.save(tmp_path / "often")
        if number == 20:
            often = Server.load(tmp_path / "often")
    often.save(tmp_path / "often")
    once.save(tmp_path / "once")

    def state_of(name):
        return (tmp_path / name / "state.json").read_bytes()

    assert state_of("often") == state_of("once")


def test_a_loaded_population_is_not_written_again(tmp_path, monkeypatch):
    crowd(20_000).save(tmp_path)
    server = Server.load(tmp_path)
    server.step({})

    assert Written(monkeypatch).by(lambda: server.save(tmp_path)) < 4000


def test_undoing_a_split_of_many_clients_keeps_all_of_them():
    tree = ParameterTree(1)
    tree.positions.place_all(ids_of(30_000), 0)
    one = np.float32([1])
    tree.split(0, [{"client-0000000": one}, {"client-0000001": -one}])
    tree.positions.place_all(ids_of(20_000)[2:], 2)
    tree.split(2, [dict.fromkeys(ids_of(9000)[2:]), {}])

    assert (tree.num_members(0), tree.num_members(2), tree.num_members(3)) == (10_000, 11_001, 8998)
    tree.undo_split(0)
    assert tree.members(0) == ids_of(30_000)
