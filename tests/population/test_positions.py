"""Positions and presence in arrays against plain dicts; what a save of a large population costs."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import fedbranch.population.int_column as columns_module
import fedbranch.population.positions as positions_module
import fedbranch.population.registry as known_module
import fedbranch.storage.checkpoint as checkpoint_module
from fedbranch import DamagedFile, NeverSplit, ParameterTree, Server, Thresholds, Update
from fedbranch.population.int_column import Column
from fedbranch.population.positions import Positions
from fedbranch.population.presence import ROUNDS_UNTIL_AWAY, Presence
from fedbranch.population.registry import KnownClients
from fedbranch.storage.checkpoint import read_checkpoint, write_checkpoint

NODES = [0, 1, 2, 5]
IDS = [f"c{i}" for i in range(40)] + ["", "é", "日本", "\ud800", "a" * 300, "key-0f", "🙂"]
SMALL = {
    columns_module: {"MOST_CHANGED": 3, "ROWS_PER_CHANGE": 8},
    known_module: {"MOST_NEWEST": 4, "MOST_RECENT": 5, "IDS_AT_ONCE": 6},
    positions_module: {"MOST_GONE": 3, "ROWS_PER_GONE": 4},
}  # fmt: skip


def make_small(patch):
    """Let everything that happens to a large population happen to a small one."""
    for module, limits in SMALL.items():
        for name, limit in limits.items():
            patch.setattr(module, name, limit)


def collide(patch):
    """Give many ids the same digest."""
    digests = known_module._digests
    patch.setattr(known_module, "_digests", lambda keys: digests(keys) % np.uint64(3))


class Dicts(RuleBasedStateMachine):
    """Positions and presence do what two dicts do, whatever is done, saved and read."""

    has_collisions = False

    @initialize()
    def begin(self):
        self.patch = pytest.MonkeyPatch()
        make_small(self.patch)
        if self.has_collisions:
            collide(self.patch)
        self.positions, self.presence = Positions(), None
        self.presence = Presence(self.positions)
        self.node_of, self.seen, self.round = {}, {}, 1

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    ids = st.sampled_from(IDS)
    some_ids = st.lists(ids, unique=True, max_size=20)
    nodes = st.sampled_from(NODES)

    @rule(client_id=ids, node_id=nodes)
    def place(self, client_id, node_id):
        self.positions.place(client_id, node_id)
        self.node_of[client_id] = node_id

    @rule(client_ids=some_ids, node_id=nodes)
    def place_all(self, client_ids, node_id):
        self.positions.place_all(client_ids, node_id)
        self.node_of |= dict.fromkeys(client_ids, node_id)

    @rule(client_ids=some_ids)
    def remove(self, client_ids):
        self.positions.remove(client_ids)
        for client_id in client_ids:
            self.node_of.pop(client_id, None)
            self.seen.pop(client_id, None)

    @rule(from_nodes=st.sets(nodes), node_id=nodes)
    def move_all(self, from_nodes, node_id):
        self.positions.move_all(from_nodes, node_id)
        for client_id, at in self.node_of.items():
            if at in from_nodes:
                self.node_of[client_id] = node_id

    @rule(client_ids=some_ids)
    def mark(self, client_ids):
        there = [i for i in client_ids if i in self.node_of]
        self.presence.mark(there, self.round)
        for client_id in self.node_of:
            self.seen.setdefault(client_id, self.round)
        self.seen |= dict.fromkeys(there, self.round)

    @rule(number=st.integers(1, ROUNDS_UNTIL_AWAY))
    def go_on(self, number):
        self.round += number

    @rule()
    def save_and_read(self):
        state, files = self.positions.to_state()
        is_known, of_presence = self.presence.to_state()
        self.positions = Positions.from_state(state, files, NODES)
        self.presence = Presence.from_state(is_known, of_presence, self.positions, self.round)
        again, files_again = self.positions.to_state()
        assert again == state
        assert self.presence.to_state()[0] == is_known
        for before, after in [(files, files_again), (of_presence, self.presence.to_state()[1])]:
            assert before.keys() == after.keys()
            for name, tensors in before.items():
                assert {k: v.tolist() for k, v in tensors.items()} == {
                    k: v.tolist() for k, v in after[name].items()
                }

    @invariant()
    def they_are_what_the_dicts_say(self):
        if not hasattr(self, "positions"):
            return
        self.presence.count_out(self.round)
        positions, node_of = self.positions, self.node_of
        since = self.round - ROUNDS_UNTIL_AWAY
        away = {i for i, seen in self.seen.items() if seen <= since}
        assert len(positions) == len(node_of)
        assert positions.client_ids == sorted(node_of)
        assert {i: positions.of(i) for i in IDS} == {i: node_of.get(i) for i in IDS}
        assert {i for i in IDS if positions.is_away(i)} == away
        assert positions.missing(IDS) == [i for i in IDS if i not in node_of]
        among = positions.among(IDS, NODES, away=False)
        for node_id in NODES:
            members = sorted(i for i, at in node_of.items() if at == node_id)
            present = [i for i in members if i not in away]
            assert positions.members([node_id]) == members
            assert positions.members([node_id], away=False) == among[node_id] == present
            assert positions.num_members(node_id) == len(members)
            assert positions.num_away(node_id) == len(members) - len(present)
        assert positions.members(NODES[:2]) == sorted(i for i, at in node_of.items() if at < 2)


class DictsWithCollisions(Dicts):
    """The same, where ids cannot be told by their digests."""

    has_collisions = True


TestDicts = Dicts.TestCase
TestDictsWithCollisions = DictsWithCollisions.TestCase
TestDicts.settings = TestDictsWithCollisions.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, derandomize=True, database=None
)


def test_a_client_that_leaves_and_returns_was_seen_when_it_returned():
    positions = Positions()
    presence = Presence(positions)
    positions.place_all(["a", "b"], 0)
    presence.mark(["a"], 1)
    positions.remove(["b"])
    positions.place("b", 0)
    presence.mark(["a"], 5)

    presence.count_out(14)
    assert not positions.is_away("b")
    presence.count_out(15)
    assert positions.is_away("a")
    assert positions.is_away("b")


# The tree and the server over many clients


def ids_of(number):
    return [f"client-{i:07d}" for i in range(number)]


def crowd(number, rule=None):
    server = Server(3, rule=NeverSplit() if rule is None else rule)
    server.join(ids_of(number))
    server.step({})
    return server


def play(server, asked, seed=0):
    rng = np.random.default_rng(seed)
    server.mark_present(asked)
    tasks = server.plan(asked)
    server.trials(asked)
    vectors = 0.1 * rng.normal(size=(len(asked), 3)).astype(np.float32)
    vectors[:, 0] += np.resize([1, -1], len(asked))
    replies = {
        i: Update(v, num_examples=1) for i, v in zip(asked, vectors, strict=True) if i in tasks
    }
    return server.step(replies)


def test_no_round_save_or_load_lists_the_members_of_a_cluster(tmp_path, monkeypatch):
    server = crowd(20_000, Thresholds(eps_mean=9, eps_max=0.1, gamma_max=0.5, coverage=0.01))

    def listed(*_):
        raise AssertionError("all members were listed")

    with monkeypatch.context() as patch:
        for name in ("members", "cluster"):
            patch.setattr(ParameterTree, name, listed)
        patch.setattr(ParameterTree, "client_ids", property(listed))
        patch.setattr(KnownClients, "ids", listed)
        for number in range(3):
            asked = ids_of(20_000)[number::80]
            assert server.awaited(asked) == []
            play(server, asked, number)
            server.save(tmp_path)
        server = Server.load(tmp_path)
        assert len(server.tree) > 1
        server.merge_split(0)

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


class Written:
    """Counts the bytes that are written."""

    def __init__(self, monkeypatch):
        self.num_bytes = 0
        replace_file = checkpoint_module.replace_file

        def counting(path, content):
            self.num_bytes += len(content)
            replace_file(path, content)

        monkeypatch.setattr(checkpoint_module, "replace_file", counting)

    def by(self, action):
        before = self.num_bytes
        action()
        return self.num_bytes - before


def test_a_save_writes_what_changed_and_not_who_is_known(tmp_path, monkeypatch):
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


def test_who_joins_in_which_order_changes_no_byte():
    prints = []
    for seed in range(3):
        server = Server(3, rule=NeverSplit())
        order = np.random.default_rng(seed).permutation(ids_of(9000)).tolist()
        server.plan(order[:5000])
        server.step({})
        prints.append(None)
        server = Server(3, rule=NeverSplit())
        server.plan(np.random.default_rng(seed).permutation(ids_of(9000)).tolist())
        server.step({})
        state, files = server.to_state()
        prints[-1] = (state, {n: {k: v.tobytes() for k, v in t.items()} for n, t in files.items()})

    assert prints[0] == prints[1] == prints[2]


def test_when_it_was_saved_changes_no_byte(tmp_path, monkeypatch):
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


def test_undoing_a_split_of_many_keeps_everybody():
    tree = ParameterTree(1)
    tree.positions.place_all(ids_of(30_000), 0)
    one = np.float32([1])
    tree.split(0, [{"client-0000000": one}, {"client-0000001": -one}])
    tree.positions.place_all(ids_of(20_000)[2:], 2)
    tree.split(2, [dict.fromkeys(ids_of(9000)[2:]), {}])

    assert (tree.num_members(0), tree.num_members(2), tree.num_members(3)) == (10_000, 11_001, 8998)
    tree.undo_split(0)
    assert tree.members(0) == ids_of(30_000)


# Files that somebody made


def saved(monkeypatch, tmp_path):
    """A server all of whose files are there, as they are read."""
    make_small(monkeypatch)
    server = crowd(30)
    for number in range(4):
        play(server, ids_of(30)[number::7], number)
    server.mark_present(["client-0000005"])
    server.join(["x", "y"])
    server.tree.place("client-0000003", 0)
    server.tree.split(0, [{"client-0000003": np.float32([1, 0, 0])}, {"x": np.float32([0, 1, 0])}])
    server.save(tmp_path)
    return read_checkpoint(tmp_path, "server")


ARRAYS = {
    "clients-0": ["packed", "ends", "digests", "order"],
    "positions": ["numbers"],
    "moves": ["packed", "ends", "rows", "numbers", "more"],
    "seen": ["numbers"],
    "sightings": ["rows", "numbers", "more"],
}


def test_all_files_of_a_population_are_there(monkeypatch, tmp_path):
    _, files = saved(monkeypatch, tmp_path)

    assert {name: set(files[name]) for name in ARRAYS} == {n: set(a) for n, a in ARRAYS.items()}


EDITS = {
    "longer": lambda array: np.concatenate([array, array[-1:]]),
    "shorter": lambda array: array[:-1],
    "empty": lambda array: array[:0],
    "of another type": lambda array: array.astype(np.float64),
    "of two dimensions": lambda array: array[None, :],
    "the largest number": lambda array: np.full_like(array, np.iinfo(array.dtype).max),
    "one number too large": lambda array: np.append(array[:-1], np.iinfo(array.dtype).max),
    "the first number too large": lambda array: np.append(np.iinfo(array.dtype).max, array[1:]),
    "the smallest number": lambda array: np.full_like(array, np.iinfo(array.dtype).min),
    "backwards": lambda array: array[::-1].copy(),
    "missing": lambda _: None,
}
# What can well be: ids with other letters, clients at other positions. That every digest is the
# right one is not checked either, which would take as long as finding everybody.
MAY_BE = {
    ("packed", "backwards"),
    ("packed", "the smallest number"),
    ("order", "backwards"),
    ("digests", "the largest number"),
    ("digests", "one number too large"),
    ("digests", "the smallest number"),
    ("numbers", "backwards"),
    ("numbers", "the smallest number"),
    ("more", "backwards"),
    ("more", "the smallest number"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("file", "name"), [(f, n) for f, names in ARRAYS.items() for n in names])
def test_arrays_that_contradict_each_other_are_refused(monkeypatch, tmp_path, file, name, edit):
    state, files = saved(monkeypatch, tmp_path)
    edited = dict(files[file])
    edited[name] = EDITS[edit](edited[name].copy())
    if edited[name] is None:
        del edited[name]
    write_checkpoint(tmp_path / "made", "server", state, {**files, file: edited})

    if (name, edit) not in MAY_BE and len(files[file][name]) > 1:
        with pytest.raises(DamagedFile, match="contradicts itself"):
            Server.load(tmp_path / "made")
        return
    try:
        server = Server.load(tmp_path / "made")
    except DamagedFile:
        return
    # Whatever was read can be worked with.
    server.plan(ids_of(30)[::5])
    server.mark_present(ids_of(30)[::5])
    server.step({})
    server.save(tmp_path / "again")


@pytest.mark.parametrize("seed", range(60))
def test_arrays_that_anybody_may_have_changed_are_read_or_refused(monkeypatch, tmp_path, seed):
    state, files = saved(monkeypatch, tmp_path)
    rng = np.random.default_rng(seed)
    files = {name: dict(tensors) for name, tensors in files.items()}
    for _ in range(rng.integers(1, 3)):
        file = str(rng.choice(list(ARRAYS)))
        name = str(rng.choice(list(files[file])))
        array = files[file][name].copy()
        limits = np.iinfo(array.dtype)
        numbers = [0, 1, 2, limits.min, limits.max, int(array[0])]
        for place in rng.integers(0, len(array), size=2):
            array[place] = numbers[rng.integers(len(numbers))]
        files[file][name] = array
    write_checkpoint(tmp_path / "made", "server", state, files)

    try:
        server = Server.load(tmp_path / "made")
    except DamagedFile:
        return
    server.plan([*ids_of(30)[::3], "x", "z"])
    server.step({})
    server.tree.cluster(0)
    server.save(tmp_path / "again")


def test_an_id_in_two_runs_is_refused(monkeypatch):
    make_small(monkeypatch)
    known = KnownClients()
    known.add(ids_of(30))
    other = KnownClients()
    other.add([*ids_of(5)[4:], *(f"other-{i}" for i in range(29))])
    _, files, _ = known.to_state()
    _, of_other, _ = other.to_state()
    (run,), (other_run,) = files.values(), of_other.values()

    twice = {"clients-0": run, "clients-30": other_run}
    with pytest.raises(ValueError, match="client 'client-0000004' is there twice"):
        KnownClients.from_state({"runs": [0, 30], "num_newest": 0}, twice, {})


def test_a_described_state_that_was_not_written_in_time_is_not_written_wrongly(monkeypatch):
    make_small(monkeypatch)
    column = Column(0)
    column.grow(20)
    column.set_many(np.arange(20, dtype=np.int32), 7)
    base, _ = column.to_state()
    column.set(3, 8)
    assert base["numbers"].tolist() == [7] * 20

    column.set_many(np.arange(20, dtype=np.int32), 9)

    with pytest.raises(AssertionError, match="changed before it was written"):
        base["numbers"]
