"""Replies in any order, by sketches, kept or added up: the same decisions and the same bytes."""

import math
import random
import threading

import numpy as np
import pytest

from fedbranch import AutoRule, Decision, Guard, NeverSplit, Server, Thresholds, Update
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.projection import Projection
from fedbranch.core.robust import median
from fedbranch.protocol.tasks import UpdateBatch
from fedbranch.server.leaf import Collecting

DIM, SIZE = 300, 64


def state_of(server):
    """All that is saved of a server, as bytes."""
    state, files = server.to_state()
    tensors = {
        (name, key): (array.dtype.str, array.shape, array.tobytes())
        for name, tensors in files.items()
        for key, array in dict(tensors).items()
    }
    return repr(_sorted(state)), tensors


def _sorted(state):
    if isinstance(state, dict):
        return {key: _sorted(state[key]) for key in sorted(state)}
    return state


def updates_of(num, seed=0, dim=DIM, num_buffers=0, num_signal=None, bases=None):
    rng = np.random.default_rng(seed)
    return {
        f"c{i:03}": Update(
            (10 ** rng.uniform(-1, 1) * rng.normal(size=dim)).astype(np.float32),
            num_examples=int(rng.integers(1, 300)),
            buffers=rng.normal(size=num_buffers).astype(np.float32) if num_buffers else None,
            signal=rng.normal(size=num_signal).astype(np.float32) if num_signal else None,
            half_difference=(0.1 * rng.normal(size=num_signal or dim)).astype(np.float32),
        )
        for i in range(num)
    }


def filled(server, updates, seed=None, num_threads=1):
    """Let replies come in in some order, from some threads."""
    intake = server.intake()
    pairs = list(updates.items())
    if seed is not None:
        random.Random(seed).shuffle(pairs)

    def add(own):
        for client_id, update in own:
            intake.add(client_id, update)

    threads = [
        threading.Thread(target=add, args=(pairs[number::num_threads],))
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return intake


SETTINGS = {
    "kept": {"sketch": None},
    "sketched and kept": {"sketch": SIZE},
    "added up": {"sketch": SIZE, "keep_updates": False},
    "added up, with buffers": {"sketch": SIZE, "keep_updates": False, "num_buffers": 3},
    "added up, with signals": {
        "sketch": 32,
        "keep_updates": False,
        "compare": "signal",
        "num_signal": 50,
    },
    "added up, all alike": {"sketch": SIZE, "keep_updates": False, "weighting": "equal"},
    "added up, no guard": {"sketch": SIZE, "keep_updates": False, "guard": None},
}


# The order changes nothing


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_order_and_threads_change_no_byte_of_the_state(name, num_threads):
    settings = SETTINGS[name]
    states = []
    for seed in (None, 1, 2):
        server = Server(DIM, rule=AutoRule(), **settings)
        for number in range(3):
            updates = updates_of(
                40, number, num_buffers=settings.get("num_buffers", 0),
                num_signal=settings.get("num_signal"),
            )  # fmt: skip
            server.plan(sorted(updates))
            intake = filled(server, updates, seed, 1 if seed is None else num_threads)
            assert not intake.refused
            server.step(intake)
        states.append(state_of(server))

    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("name", SETTINGS)
def test_one_by_one_is_the_same_as_all_at_once(name):
    settings = SETTINGS[name]
    num_signal = settings.get("num_signal")
    num_buffers = settings.get("num_buffers", 0)
    updates = updates_of(30, num_buffers=num_buffers, num_signal=num_signal)
    one_by_one, mapping, batch = (Server(DIM, rule=NeverSplit(), **settings) for _ in range(3))
    for server in (one_by_one, mapping, batch):
        server.plan(sorted(updates))
    rows = list(updates.values())

    one_by_one.step(filled(one_by_one, updates, seed=3))
    mapping.step(updates)
    batch.step(
        UpdateBatch(
            client_ids=list(updates),
            vectors=np.stack([row.vector for row in rows]),
            buffers=np.stack([row.buffers for row in rows]) if num_buffers else None,
            signals=np.stack([row.signal for row in rows]) if num_signal else None,
            half_differences=np.stack([row.half_difference for row in rows]),
            num_examples=[row.num_examples for row in rows],
            bases=[batch.tree.root.base] * 30,
            metrics=[{}] * 30,
        )
    )

    assert state_of(one_by_one) == state_of(mapping) == state_of(batch)


# What comes out


def test_the_mean_of_what_was_added_up_is_the_weighted_mean():
    updates = updates_of(50, num_buffers=4)
    server = Server(DIM, rule=NeverSplit(), num_buffers=4, sketch=SIZE, keep_updates=False)
    server.plan(sorted(updates))

    server.step(filled(server, updates, seed=0, num_threads=2))

    weights = np.array([update.num_examples for update in updates.values()], dtype=np.float64)
    for found, rows in [
        (server.tree.root.params, [update.vector for update in updates.values()]),
        (server.tree.root.buffers, [update.buffers for update in updates.values()]),
    ]:
        # 2**-32 of each update's largest entry, and what float32 cannot show.
        exact = weighted_mean(np.stack(rows).astype(np.float64), weights)
        np.testing.assert_allclose(found, exact, rtol=2**-23, atol=2**-30)


@pytest.mark.parametrize("keep_updates", [True, False])
def test_what_a_rule_is_shown_has_exact_lengths(keep_updates):
    seen = []

    class Watching:
        def examine(self, evidence):
            seen.append(evidence)
            return NeverSplit().examine(evidence)

    updates = updates_of(20)
    server = Server(DIM, rule=Watching(), sketch=SIZE, keep_updates=keep_updates, guard=None)
    server.plan(sorted(updates))
    server.step(updates)

    (evidence,) = seen
    vectors = np.stack([updates[i].vector for i in evidence.client_ids])
    weights = np.array([updates[i].num_examples for i in evidence.client_ids])
    mean = weighted_mean(vectors, weights)
    assert evidence.projection == Projection(dim=DIM, size=SIZE)
    np.testing.assert_array_equal(evidence.updates, evidence.projection.of(vectors))
    np.testing.assert_allclose(evidence.lengths, np.linalg.norm(vectors, axis=1), rtol=1e-6)
    assert evidence.mean_length == pytest.approx(np.linalg.norm(mean), rel=1e-6)
    np.testing.assert_allclose(
        evidence.mean_update, evidence.projection.of(mean[None, :])[0], rtol=1e-3, atol=1e-5
    )
    if keep_updates:
        np.testing.assert_array_equal(evidence.whole, vectors)
    else:
        assert evidence.whole is None


def test_without_sketches_nothing_is_new_to_a_rule():
    seen = []

    class Watching:
        def examine(self, evidence):
            seen.append(evidence)
            return NeverSplit().examine(evidence)

    updates = updates_of(5)
    server = Server(DIM, rule=Watching(), guard=None)
    server.plan(sorted(updates))
    server.step(updates)

    assert seen[0].projection is None
    assert seen[0].whole is None
    assert seen[0].updates.shape == (5, DIM)


# Decisions by sketches are the exact ones


def planted(num_clients, num_groups, dim, noise, seed):
    """Optima of groups in opposite and in skew directions, and the rounds' updates around them."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(num_groups, dim)) / np.sqrt(dim)
    centres -= centres.mean(axis=0)
    group = np.arange(num_clients) % num_groups
    ids = [f"c{i:03}" for i in range(num_clients)]
    spread = noise * np.linalg.norm(centres, axis=1).mean() / np.sqrt(dim)

    def updates(tasks, number, with_halves):
        answers = {}
        for row, client_id in enumerate(ids):
            if client_id not in tasks:
                continue
            draw = np.random.default_rng((seed, number, row))
            step = 0.5 * (centres[group[row]] - tasks[client_id].params)
            a, b = (step + spread * np.sqrt(2) * draw.normal(size=dim) for _ in range(2))
            answers[client_id] = Update(
                ((a + b) / 2).astype(np.float32),
                num_examples=1,
                half_difference=((a - b) / 2).astype(np.float32) if with_halves else None,
            )
        return answers

    return ids, group, updates


def clusters_after(rule, ids, updates, num_rounds, dim, with_halves, **settings):
    server = Server(dim, rule=rule, **settings)
    for number in range(num_rounds):
        tasks = server.plan(ids)
        server.step(updates(tasks, number, with_halves))
    return sorted(tuple(members) for members in server.clusters.values())


@pytest.mark.parametrize("keep_updates", [True, False])
@pytest.mark.parametrize(
    ("num_clients", "num_groups", "dim", "noise"),
    [(30, 2, 10_000, 0.5), (60, 4, 20_000, 1.0), (200, 5, 10_000, 1.0), (24, 3, 50_000, 1.5)],
)
def test_the_default_rule_finds_the_same_groups_by_sketches(
    num_clients, num_groups, dim, noise, keep_updates
):
    ids, group, updates = planted(num_clients, num_groups, dim, noise, seed=num_clients)
    truth = sorted(
        tuple(i for i, own in zip(ids, group, strict=True) if own == g) for g in range(num_groups)
    )

    found = clusters_after(
        AutoRule(), ids, updates, 7, dim, True, sketch=1024, keep_updates=keep_updates
    )
    exact = clusters_after(AutoRule(), ids, updates, 7, dim, True)

    assert found == exact == truth


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_the_papers_rule_finds_the_same_groups_by_sketches(noise):
    dim = 10_000
    ids, _, updates = planted(40, 2, dim, noise, seed=1)
    rule = Thresholds(eps_mean=0.2, eps_max=0.3, gamma_max=0.3)

    found = clusters_after(rule, ids, updates, 8, dim, False, sketch=1024, keep_updates=False)
    exact = clusters_after(rule, ids, updates, 8, dim, False)

    assert found == exact
    assert len(found) == 2


@pytest.mark.parametrize("keep_updates", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_one_population_stays_one_by_sketches(seed, keep_updates):
    dim = 10_000
    ids, _, updates = planted(40, 1, dim, 1.0, seed)
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=dim) / np.sqrt(dim)

    def moved(tasks, number, with_halves):
        answers = updates(tasks, number, with_halves)
        own = np.random.default_rng((seed, number)).normal(size=(len(answers), dim)) / np.sqrt(dim)
        return {
            i: Update(
                (answer.vector + 0.5 * (centre - tasks[i].params) + 0.5 * noise).astype(np.float32),
                num_examples=1,
                half_difference=(0.5 * noise[::-1]).astype(np.float32),
            )
            for (i, answer), noise in zip(answers.items(), own, strict=True)
        }

    found = clusters_after(
        AutoRule(), ids, moved, 6, dim, True, sketch=1024, keep_updates=keep_updates
    )

    assert found == [tuple(ids)]


@pytest.mark.parametrize("keep_updates", [True, False])
def test_newcomers_are_routed_by_sketches(keep_updates):
    dim = 10_000
    ids, group, updates = planted(40, 2, dim, 0.7, seed=2)
    server = Server(dim, sketch=1024, keep_updates=keep_updates)
    first = ids[:30]
    for number in range(6):
        server.step(updates(server.plan(first), number, True))
    assert len(server.clusters) == 2
    for number in range(6, 9):
        server.step(updates(server.plan(ids), number, True))

    for members in server.clusters.values():
        assert len({int(group[ids.index(i)]) for i in members}) == 1
    assert sum(map(len, server.clusters.values())) == 40
    assert all(
        update.shape == (1024,) for node in server.tree for update in node.cached_updates.values()
    )


# Over rounds and in files


@pytest.mark.parametrize("name", ["sketched and kept", "added up", "added up, with signals"])
@pytest.mark.parametrize("saved_after", range(5))
def test_a_server_that_is_saved_in_the_middle_goes_on_as_if_it_was_not(name, saved_after, tmp_path):
    settings = SETTINGS[name]
    num_signal = settings.get("num_signal")
    rule = Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99, coverage=0.9, max_hold_rounds=3)

    def rounds(server, numbers):
        for number in numbers:
            updates = updates_of(30, number, num_signal=num_signal)
            # A third of them answer in every round, so that it stands still for three.
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


def test_sums_go_on_while_a_cluster_stands_still():
    rule = Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99, coverage=1.0)
    updates = updates_of(12)
    kept = Server(DIM, rule=rule, sketch=SIZE, guard=None)
    dropped = Server(DIM, rule=rule, sketch=SIZE, keep_updates=False, guard=None)
    for server in (kept, dropped):
        for part in range(3):
            server.plan(updates)
            record = server.step({i: u for i, u in updates.items() if int(i[1:]) % 3 == part})
        assert record.decisions[0].verdict == "train"

    np.testing.assert_allclose(
        dropped.tree.root.params, kept.tree.root.params, rtol=1e-6, atol=1e-8
    )


def test_who_comes_back_while_a_cluster_stands_still_is_not_counted_twice():
    rule = Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99, coverage=1.0)
    updates = updates_of(6)
    once, twice = (
        Server(DIM, rule=rule, sketch=SIZE, keep_updates=False, guard=None) for _ in range(2)
    )
    for server in (once, twice):
        server.plan(sorted(updates))
        server.step({i: updates[i] for i in list(updates)[:3]})
    twice.remove(["c000"])
    for server in (once, twice):
        server.plan(sorted(updates))
        server.step({i: updates[i] for i in list(updates)[3:]})
    twice.plan(sorted(updates))
    twice.step({"c000": updates["c000"]})

    assert once.tree.root.params.tobytes() == twice.tree.root.params.tobytes()


def test_nothing_that_was_added_up_is_kept():
    server = Server(DIM, rule=Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99),
                    sketch=SIZE, keep_updates=False)  # fmt: skip
    updates = updates_of(20)
    server.plan([*updates, *(f"d{i}" for i in range(40))])
    server.step(updates)

    (leaf,) = server.state.leaves.values()
    assert leaf.phase == Collecting(rounds_held=1, halves=None)
    for reply in leaf.store.replies.values():
        rows = reply.rows
        assert rows.update is rows.buffers is rows.signal is rows.half is None
        assert rows.compared.shape[1] == SIZE


def test_a_round_that_failed_can_be_tried_again_with_the_same_intake():
    class Failing:
        fails = True

        def examine(self, evidence):
            if self.fails:
                raise RuntimeError("no")
            return NeverSplit().examine(evidence)

    updates = updates_of(10)
    rule = Failing()
    server = Server(DIM, rule=rule, sketch=SIZE, keep_updates=False)
    other = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    for each in (server, other):
        each.plan(sorted(updates))
    intake = filled(server, updates)
    with pytest.raises(RuntimeError):
        server.step(intake)
    rule.fails = False

    server.step(intake)
    other.step(updates)

    assert server.tree.root.params.tobytes() == other.tree.root.params.tobytes()


def test_what_comes_when_the_round_is_over_is_refused():
    updates = updates_of(10)
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    server.plan(sorted(updates))
    intake = server.intake()
    intake.add_all({i: update for i, update in updates.items() if i != "c009"})

    server.step(intake)
    (task,) = server.plan(["c009"]).values()
    state = state_of(server)

    for base in (None, task.base):  # whatever it was computed at
        late = Update(updates["c009"].vector, num_examples=1, base=base)
        assert intake.add("c009", late) == "came too late: the round is over"
    batch = UpdateBatch(
        client_ids=["c009"],
        vectors=updates["c009"].vector[None, :],
        num_examples=[1.0],
        bases=[task.base],
        metrics=[{}],
    )
    assert intake.add_batch(batch) == {"c009": "came too late: the round is over"}
    assert "closed: 9 taken" in repr(intake)
    assert state_of(server) == state


def test_metrics_are_those_of_all_replies_that_were_used():
    updates = updates_of(4)
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE)
    server.plan(sorted(updates))
    intake = server.intake()
    nothing = Update(np.full(DIM, np.nan, np.float32), num_examples=1)
    assert intake.add("c001", nothing) is not None

    intake.add_all(updates)
    record = server.step(intake)

    assert set(record.metrics) == set(updates)
    assert set(record.refused) == {"c001"}  # its first reply


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sketch": "1024"}, "sketch is '1024'; give the size"),
        ({"sketch": 64.0}, "sketch is 64.0; give the size"),
        ({"sketch": 64, "keep_updates": "no"}, "keep_updates is 'no'"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(TypeError, match=message):
        Server(DIM, **settings)


def test_what_is_no_reply_at_all_is_named():
    server = Server(DIM)
    with pytest.raises(TypeError, match="updates contain 1; pass a mapping"):
        server.step([1, 2])


# Updates that are added as they lie


def some_replies(server, tasks, seed, num_buffers):
    """Replies of many kinds, as what came back of each client; some cannot be used."""
    rng = np.random.default_rng(seed)
    replies = {}
    for number, (client_id, task) in enumerate(tasks.items()):
        scale = 0.1 * 3.0 ** rng.integers(-2, 3) * (40 if rng.random() < 0.05 else 1)
        vector = (scale * rng.normal(size=DIM)).astype(np.float32)
        buffers = rng.normal(size=num_buffers).astype(np.float32)
        weight, base, metrics = float(rng.integers(1, 60)), task.base, {"loss": 0.5}
        match rng.integers(0, 30):
            case 0:
                vector[number] = [np.nan, np.inf, 3e38, 1e30][number % 4]
            case 1:
                vector[:] = 0
            case 2:
                weight = [0.5, 1e6, 1001, -1, math.inf, "many"][number % 6]
            case 3:
                base = "another"
            case 4:
                metrics = [{"loss": math.nan}, {"loss": "low"}, {"\x1b": 1.0}, None][number % 4]
            case 5:
                buffers[:1] = [np.nan, 9e30, 1e30][number % 3]
            case 6:
                client_id = f"stranger-{number}"
            case 7:
                vector *= 1e-13
        replies[client_id] = (vector, buffers, weight, base, metrics)
    return replies


def as_batch(replies, num_buffers, *, is_lying):
    """Put replies into a batch, either written down or in two pieces each."""
    columns = list(zip(*replies.values(), strict=True))
    vectors = np.stack(columns[0])
    if is_lying:
        pieces = [
            b"head" + part.tobytes() for vector in vectors for part in (vector[:7], vector[7:])
        ]
        vectors = Differences(pieces, [4, 4], [7, DIM - 7], np.zeros(DIM, np.float32))
    return UpdateBatch(
        client_ids=list(replies),
        vectors=vectors,
        buffers=np.stack(columns[1]) if num_buffers else None,
        num_examples=columns[2],
        bases=columns[3],
        metrics=columns[4],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("guard", [Guard(), None, Guard(max_share=0.05, clipped_length=None)])
@pytest.mark.parametrize("num_buffers", [0, 3])
def test_updates_that_are_added_as_they_lie_are_as_if_they_had_been_written_down(
    seed, guard, num_buffers
):
    pytest.importorskip("numba", reason="there is no machine code without Numba")
    results = []
    weighting = "equal" if seed == 5 else "examples"
    for is_lying in (False, True):
        server = Server(
            DIM,
            rule=AutoRule() if seed % 2 else Thresholds(eps_mean=9.0, eps_max=1e-6, gamma_max=0.9),
            sketch=SIZE,
            keep_updates=False,
            num_buffers=num_buffers,
            guard=guard,
            weighting=weighting,
        )
        records, order = [], random.Random(seed)
        for number in range(4):
            tasks = server.plan([f"c{i:03}" for i in range(60)])
            replies = list(some_replies(server, tasks, (seed, number), num_buffers).items())
            if is_lying:
                order.shuffle(replies)
            intake = server.intake()
            step = 7 if is_lying else len(replies)
            for start in range(0, len(replies), step):
                some = dict(replies[start : start + step])
                intake.add_batch(as_batch(some, num_buffers, is_lying=is_lying))
            records.append(server.step(intake))
        results.append((records, state_of(server)))

    (records, state), (others, other) = results
    assert records == others
    assert state == other
    assert any(record.refused for record in records)
    assert all(record.metrics for record in records)


@pytest.mark.parametrize("guard", [None, Guard()])
def test_a_batch_of_which_nothing_can_be_used_leaves_no_trace(guard):
    pytest.importorskip("numba", reason="there is no machine code without Numba")
    states = []
    for is_there in (False, True):
        server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False, guard=guard)
        (task,) = server.plan(["a"]).values()
        intake = server.intake()
        if is_there:
            nothing = np.full(DIM, np.nan, np.float32)
            reply = (nothing, np.zeros(0, np.float32), 1.0, task.base, {})
            refused = intake.add_batch(as_batch({"a": reply}, 0, is_lying=True))
            assert "NaN" in refused["a"]
        server.step(intake)
        states.append(state_of(server))

    assert states[0] == states[1]


# What is refused, and what the guard does


def test_bad_replies_are_refused_at_once_and_cost_the_others_nothing():
    updates = updates_of(8)
    bad = {
        "c000": Update(np.full(DIM, np.nan, np.float32), 1),
        "c001": Update(np.zeros(DIM, np.float32), 1),
        "c002": Update(np.ones(DIM - 1, np.float32), 1),
        "c003": Update(updates["c003"].vector, -1),
        "c004": Update(updates["c004"].vector, 1, base="another"),
        "stranger": updates["c005"],
        "c006": "nonsense",
    }
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    only_good = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    for each in (server, only_good):
        each.plan(sorted(updates))
    intake = server.intake()

    reasons = {i: intake.add(i, update) for i, update in bad.items()}
    assert intake.add("c005", updates["c005"]) is None
    assert intake.add("c007", updates["c007"]) is None
    assert "already answered" in intake.add("c007", updates["c006"])
    record = server.step(intake)
    only_good.step({i: updates[i] for i in ("c005", "c007")})

    for client_id, word in {
        "c000": "NaN",
        "c001": "zero",
        "c002": "shape (299,)",
        "c003": "num_examples",
        "c004": "other parameters",
        "stranger": "unknown client",
        "c006": "send an Update",
    }.items():
        assert word in reasons[client_id]
        assert record.refused[client_id] == reasons[client_id]
    assert server.tree.root.params.tobytes() == only_good.tree.root.params.tobytes()


def test_one_by_one_and_in_a_batch_replies_are_refused_for_the_same_reasons():
    ones = np.ones(DIM, np.float32)
    vectors = {
        "a": ones * np.float32(1e30),
        "b": ones * np.nextafter(np.float32(1e30), np.float32(2e30)),
        "c": ones * np.float32(np.nan),
        "d": ones * np.float32(np.nan),
        "e": ones * np.float32(np.nan),
        "f": ones,
    }
    found = []
    for is_batch in (False, True):
        server = Server(DIM, rule=NeverSplit(), guard=None)
        bases = {i: task.base for i, task in server.plan(list("abcdf")).items()} | {
            "d": "no",
            "e": "0",
        }
        intake = server.intake()
        if is_batch:
            intake.add_batch(
                UpdateBatch(
                    client_ids=list(vectors),
                    vectors=np.stack(list(vectors.values())),
                    num_examples=[1.0] * 5 + [-1.0],
                    bases=[bases[i] for i in vectors],
                    metrics=[{}] * 6,
                )
            )
        else:
            for client_id, vector in vectors.items():
                weight = -1.0 if client_id == "f" else 1.0
                intake.add(client_id, Update(vector, weight, base=bases[client_id]))
        found.append(intake.refused)

    assert found[0] == found[1]
    assert found[0].keys() == {"b", "c", "d", "e", "f"}
    assert "other parameters" in found[0]["d"]
    assert "unknown client" in found[0]["e"]


def similar_updates(num, seed, size=1.0):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=DIM)
    return {
        f"c{i:03}": Update(
            (size * (common + 0.5 * rng.normal(size=DIM))).astype(np.float32), num_examples=1
        )
        for i in range(num)
    }


def test_lengths_are_judged_by_the_round_before():
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    free = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False, guard=None)
    for each in (server, free):
        each.plan(sorted(similar_updates(20, 0)))
        each.step(similar_updates(20, 0))
    before = server.tree.root.params.copy()
    updates = similar_updates(20, 1)
    usual = float(np.median([np.linalg.norm(u.vector) for u in similar_updates(20, 0).values()]))
    lengths = {"c000": 30.0, "c001": 8.0}
    for client_id, times in lengths.items():
        vector = updates[client_id].vector
        updates[client_id] = Update(vector * np.float32(times), num_examples=1)
    server.plan(sorted(updates))
    free.plan(sorted(updates))

    intake = filled(server, updates, seed=1)
    record = server.step(intake)
    free.step(updates)

    assert "30" in record.refused["c000"] or "times as long as usual" in record.refused["c000"]
    assert server.state.set_aside == {"c000"}
    counted = {i: u.vector.astype(np.float64) for i, u in updates.items() if i != "c000"}
    counted["c001"] *= 4 * usual / np.linalg.norm(counted["c001"])
    np.testing.assert_allclose(
        server.tree.root.params - before, np.mean(list(counted.values()), axis=0), atol=1e-5
    )
    assert np.linalg.norm(free.tree.root.params) > 1.5 * np.linalg.norm(server.tree.root.params)


def test_strangers_are_seen_by_their_sketches():
    dim = 5000
    rng = np.random.default_rng(0)
    common = rng.normal(size=dim)
    updates = {
        f"c{i:03}": Update((common + 0.3 * rng.normal(size=dim)).astype(np.float32), 1)
        for i in range(20)
    }
    updates["c007"] = Update(rng.normal(size=dim).astype(np.float32), 1)
    server = Server(dim, rule=NeverSplit(), sketch=1024, keep_updates=False)
    server.plan(sorted(updates))

    record = server.step(updates)

    assert list(record.refused) == ["c007"]
    assert "resembles no other" in record.refused["c007"]
    assert record.decisions[0].measurements["num_answered"] == 19


@pytest.mark.parametrize("share", [0.5, 0.3, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_gets_more_than_its_share_whoever_came_first(share, seed):
    updates = updates_of(25, seed)
    heavy = {"c003": 50_000, "c011": 9_000, "c017": 700}
    updates = {i: Update(u.vector, heavy.get(i, u.num_examples)) for i, u in updates.items()}
    guard = Guard(max_share=share, max_length=None, clipped_length=None)
    kept = Server(DIM, rule=NeverSplit(), guard=guard)
    dropped = Server(DIM, rule=NeverSplit(), guard=guard, sketch=SIZE, keep_updates=False)
    for server in (kept, dropped):
        server.plan(sorted(updates))
        server.step(filled(server, updates, seed))

    np.testing.assert_allclose(
        dropped.tree.root.params, kept.tree.root.params, rtol=1e-6, atol=1e-8
    )


def test_what_cannot_go_together_is_refused():
    with pytest.raises(ValueError, match="keep_updates is False without sketches"):
        Server(DIM, keep_updates=False)
    with pytest.raises(ValueError, match="no other aggregate than weighted_mean"):
        Server(DIM, sketch=SIZE, keep_updates=False, aggregate=median)
    with pytest.raises(ValueError, match="sketch is 3"):
        Server(DIM, sketch=3)
    with pytest.raises(ValueError, match="sketch is for vectors of 299 numbers"):
        Server(DIM, sketch=Projection(dim=299, size=32))
    server = Server(DIM, rule=NeverSplit())
    old = server.intake()
    server.step({})
    with pytest.raises(ValueError, match="the intake is of round 1, and this is round 2"):
        server.step(old)


def test_nobody_is_asked_to_measure_what_cannot_be_made():
    dim = 2000
    ids, _, updates = planted(20, 2, dim, 0.5, seed=3)
    server = Server(dim, sketch=512, keep_updates=False, rule=AutoRule(review_after=()))
    verdicts = []
    for number in range(6):
        tasks = server.plan(ids)
        assert server.trials(ids) == {}
        record = server.step(updates(tasks, number, True))
        verdicts += [decision.verdict for decision in record.decisions]

    assert "hold" not in verdicts  # nor does anybody stand still for it
    assert len(server.clusters) == 2


def test_no_claimed_weight_makes_a_saved_server_unreadable(tmp_path):
    rule = Thresholds(eps_mean=1e9, eps_max=1e-9, gamma_max=0.1, coverage=1.0)
    server = Server(DIM, rule=rule, sketch=SIZE, keep_updates=False)
    updates = similar_updates(8, 0, size=1e-3)
    server.plan([*updates, "who is waited for"])
    claimed = {i: Update(u.vector, num_examples=1e-9) for i, u in updates.items()}
    server.step(updates | {"c000": claimed["c000"]})

    server.save(tmp_path)

    assert state_of(Server.load(tmp_path)) == state_of(server)


def test_sums_of_all_sizes_take_a_bounded_number_of_them():
    server = Server(2, rule=NeverSplit(), sketch=16, keep_updates=False, guard=None)
    ids = [f"c{number}" for number in range(2200)]
    server.plan(ids)
    intake = server.intake()
    for number, client_id in enumerate(ids):
        vector = np.float32([10.0 ** (number % 66 - 37), 1e-38])
        refused = intake.add(client_id, Update(vector, num_examples=10.0 ** (number // 66 - 15)))
        assert ("num_examples" in refused) if number // 66 < 6 or number // 66 > 24 else not refused

    summed = intake.store(0, None, {})

    assert len(summed.sums.by_name["vector"].to_tensors()) < 80


class SplitsInRoundTwo:
    def examine(self, evidence):
        ids = evidence.client_ids
        is_now = evidence.round == 2
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="split" if is_now else "train",
            reason="planned",
            groups=(ids[: len(ids) // 2], ids[len(ids) // 2 :]) if is_now else (),
        )


def test_lengths_are_judged_in_the_round_after_a_split_as_well():
    server = Server(DIM, rule=SplitsInRoundTwo(), sketch=SIZE, keep_updates=False)
    for number in (1, 2):
        updates = similar_updates(20, number)
        server.plan(updates)
        server.step(updates)
    updates = similar_updates(20, 3)
    server.plan(updates)

    record = server.step(updates | {"c000": Update(1e20 * updates["c001"].vector, num_examples=1)})

    assert "times as long as usual" in record.refused["c000"]
    assert np.abs(server.tree[1].params).max() < 100


def two_that_answered(**settings):
    server = Server(4, rule=NeverSplit(), **settings)
    server.plan(["a", "b", "c"])
    intake = server.intake()
    for number, client_id in enumerate("abc"):
        update = np.float32([1, number, 0, 1])
        assert intake.add(client_id, Update(update, num_examples=1)) is None
    return server, intake


def test_who_leaves_between_reply_and_round_is_refused_alone():
    server, intake = two_that_answered()
    server.remove(["b"])

    record = server.step(intake)

    assert record.refused == {"b": "has left since it replied"}
    assert record.decisions[0].measurements["num_answered"] == 2
    assert server.tree.root.params.tolist() == [1, 1, 0, 1]


def test_who_leaves_after_a_reply_that_was_too_long_stops_no_round():
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    for number in (1, 2):
        updates = similar_updates(20, number)
        server.plan(updates)
        intake = server.intake()
        if number == 2:
            updates["c000"] = Update(1e20 * updates["c000"].vector, num_examples=1)
        intake.add_all(updates)
        if number == 2:
            server.remove(["c000"])
        record = server.step(intake)

    assert "times as long as usual" in record.refused["c000"]
    assert record.decisions[0].measurements["num_answered"] == 19


def test_an_intake_is_for_its_own_server_only():
    _, intake = two_that_answered()
    other, _ = two_that_answered()

    with pytest.raises(ValueError, match="of another server"):
        other.step(intake)


def test_an_intake_does_not_outlive_a_change_of_the_tree():
    server, intake = two_that_answered()
    server.tree.advance(0, np.ones(4, dtype=np.float32))

    with pytest.raises(ValueError, match="the tree has changed"):
        server.step(intake)


@pytest.mark.parametrize(("size", "noise"), [(64, 1.5), (256, 2.5), (1024, 3.0)])
def test_the_default_rule_decides_as_by_whole_updates_if_they_are_kept(size, noise):
    dim = 4_000
    ids, _, updates = planted(40, 4, dim, noise, seed=1)

    found, exact = [], []
    for made, settings in ((found, {"sketch": size}), (exact, {})):
        server = Server(dim, rule=AutoRule(), **settings)
        for number in range(4):
            record = server.step(updates(server.plan(ids), number, True))
            made.append([(d.verdict, d.groups) for d in record.decisions])

    assert found == exact
    assert len(server.clusters) == 4


def test_sketches_have_no_more_numbers_than_what_is_compared():
    server = Server(100, sketch=2_000_000)

    assert server.projection.size == 100
    assert Server(10, sketch=1024).projection.size == 16


def test_sketches_as_long_as_updates_decide_without_comparing_these():
    ids, _, updates = planted(12, 2, 300, 0.3, seed=0)
    rule = Thresholds(eps_mean=1e9, eps_max=1e-9, gamma_max=0.7)
    server = Server(300, rule=rule, sketch=300)

    (decision,) = server.step(updates(server.plan(ids), 0, False)).decisions

    assert decision.verdict == "split"
    assert decision.measurements["num_compared_in_full"] < 12 * 11 / 2
