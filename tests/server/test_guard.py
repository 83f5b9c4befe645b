"""Hostile clients are set aside and capped; honest ones are left alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch import Guard, ParameterTree, Server, Thresholds, Update
from fedbranch.server.guard import capped_weights

DIM = 2000


IDS = [f"client-{number:02}" for number in range(20)]


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def similar_updates(seed=0, num_clients=20, noise=1.0):
    """Return updates that have a direction in common."""
    return drawn(seed, DIM)[None, :] + noise * drawn(seed + 1, num_clients, DIM)


def stepped(server, updates, num_examples=None):
    """Let clients answer with these updates, by id, and return the record."""
    server.plan(sorted(updates))
    counts = num_examples or {}
    return server.step({i: Update(u, counts.get(i, 10)) for i, u in updates.items()})


def by_id(updates):
    return dict(zip(IDS, updates, strict=False))


def test_an_update_a_hundred_times_as_long_as_usual_is_set_aside():
    updates = by_id(similar_updates())
    updates["client-03"] = 100 * updates["client-03"]
    server = Server(DIM)

    record = stepped(server, updates)

    assert list(record.refused) == ["client-03"]
    assert "times as long as usual" in record.refused["client-03"]


def test_the_round_is_as_if_the_client_had_been_absent():
    updates = by_id(similar_updates())
    others = {i: u for i, u in updates.items() if i != "client-03"}
    server, without = Server(DIM), Server(DIM)

    stepped(server, {**updates, "client-03": 100 * updates["client-03"]})
    stepped(without, others)

    assert np.array_equal(server.tree.root.params, without.tree.root.params)


def test_endless_buffers_are_set_aside():
    server = Server(DIM, num_buffers=3)
    server.plan(IDS)

    record = server.step(
        {
            i: Update(u, 10, buffers=np.full(3, 1e20 if i == "client-07" else 0.1, np.float32))
            for i, u in by_id(similar_updates()).items()
        }
    )

    assert list(record.refused) == ["client-07"]
    assert "the buffers" in record.refused["client-07"]


@pytest.mark.parametrize("has_guard", [True, False])
def test_one_client_with_long_updates_cannot_stop_the_others_from_splitting(has_guard):
    east, west = drawn(0, DIM), -drawn(0, DIM)
    rule = Thresholds(eps_mean=5.0, eps_max=5.0, gamma_max=0.5)
    server = Server(DIM, rule=rule, guard=Guard() if has_guard else None)
    pull = {i: east if number % 2 else west for number, i in enumerate(IDS)}
    rng = np.random.default_rng(1)

    for _ in range(3):
        shout = 100 * rng.normal(size=DIM).astype(np.float32)
        stepped(server, {**pull, "client-19": shout})

    assert (len(server.clusters) == 2) == has_guard


def test_one_against_nineteen_at_rest_is_no_attack():
    # At a stationary solution the few must be as long as all the others together.
    server = Server(DIM)
    common = drawn(0, DIM)

    record = stepped(server, {i: -19 * common if i == IDS[0] else common for i in IDS})

    assert not record.refused


def test_no_client_is_set_aside_among_four():
    updates = by_id(similar_updates(num_clients=4))
    updates["client-03"] = 1e6 * updates["client-03"]

    assert not stepped(Server(DIM), updates).refused


def test_in_means_an_update_counts_with_a_few_times_the_usual_length():
    updates = similar_updates(num_clients=10)
    updates[0] *= -10  # against the others, so that it does not drag the mean along
    lengths = np.linalg.norm(updates, axis=1)
    server = Server(DIM)

    record = stepped(server, by_id(updates))

    updates[0] *= 4 * np.median(lengths) / lengths[0]
    assert not record.refused
    assert np.allclose(server.tree.root.params, updates.mean(axis=0), atol=1e-5)


def test_a_client_that_drags_all_others_along_is_set_aside_unless_it_has_more_data():
    updates = similar_updates(num_clients=10)
    updates[0] *= 10

    record = stepped(Server(DIM), by_id(updates))
    with_more_data = stepped(Server(DIM), by_id(updates), {IDS[0]: 30})

    assert list(record.refused) == [IDS[0]]
    assert not with_more_data.refused


def test_a_client_set_aside_for_its_length_is_readmitted_when_its_reply_is_shorter():
    updates = similar_updates(num_clients=10)
    server = Server(DIM)

    refused = [
        list(stepped(server, by_id(np.concatenate([times * updates[:1], updates[1:]]))).refused)
        for times in (100, -10, 2)
    ]

    assert refused == [[IDS[0]], [IDS[0]], []]


def test_clients_that_are_set_aside_do_not_define_the_usual_length():
    updates = by_id(similar_updates())
    shouting = {i: 100 * updates[i] for i in IDS[:8]}
    server = Server(DIM)
    stepped(server, updates | shouting)

    # Most of the honest clients are absent.
    record = stepped(server, {i: updates[i] for i in IDS[17:]} | shouting)

    assert set(record.refused) == set(shouting)


def test_updates_of_usual_length_are_averaged_to_the_bit():
    updates = by_id(similar_updates())
    guarded, plain = Server(DIM), Server(DIM, guard=None)

    for server in (guarded, plain):
        stepped(server, updates)

    assert np.array_equal(guarded.tree.root.params, plain.tree.root.params)


def test_noise_among_similar_updates_is_set_aside():
    updates = by_id(similar_updates())
    noise = drawn(9, 8, DIM)
    for row, client_id in enumerate(IDS[:8]):
        updates[client_id] = noise[row]

    record = stepped(Server(DIM), updates)

    assert set(record.refused) == set(IDS[:8])
    assert "resembles no other" in record.refused[IDS[0]]


def test_a_stranger_is_readmitted_when_it_resembles_another_client():
    server = Server(DIM)
    updates = by_id(similar_updates())

    first = stepped(server, {**updates, IDS[0]: drawn(9, DIM)})
    second = stepped(server, updates)

    assert list(first.refused) == [IDS[0]]
    assert not second.refused


def test_a_stranger_is_not_routed_until_it_resembles_a_cached_update():
    east, west = drawn(0, DIM), -drawn(0, DIM)
    rule = Thresholds(eps_mean=30.0, eps_max=5.0, gamma_max=0.5)
    server = Server(DIM, rule=rule)
    pull = {i: east if n % 2 else west for n, i in enumerate(IDS)}
    stepped(server, {**pull, IDS[0]: drawn(90, DIM)})  # which splits the others

    noise = stepped(server, {IDS[0]: drawn(91, DIM)})
    like_the_others = stepped(server, {IDS[0]: west})

    assert "still resembles no other" in noise.refused[IDS[0]]
    assert [move.client_id for move in like_the_others.routed] == [IDS[0]]


def test_in_few_dimensions_every_update_is_known():
    assert Guard().knows([0.01, -0.2], dim=10)
    assert not Guard().knows([0.01, -0.2], dim=10_000)


def test_a_group_that_conflicts_with_all_others_is_no_stranger():
    common = drawn(0, DIM)
    updates = by_id(similar_updates())
    for row, client_id in enumerate(IDS[:3]):
        updates[client_id] = drawn(50, DIM) + 0.2 * drawn(60 + row, DIM)  # unlike the others
    updates[IDS[3]] = -common  # unlike all others, and no noise

    assert not stepped(Server(DIM), updates).refused


def test_where_no_update_resembles_another_none_is_a_stranger():
    assert not stepped(Server(DIM), by_id(drawn(3, 20, DIM))).refused


def test_in_few_dimensions_no_update_is_a_stranger():
    server = Server(10)
    common = drawn(0, 10)

    record = stepped(server, {i: common + 0.1 * drawn(n, 10) for n, i in enumerate(IDS)})

    assert not record.refused


def test_no_split_waits_for_clients_that_are_set_aside():
    east, west = drawn(0, DIM), -drawn(0, DIM)
    rule = Thresholds(eps_mean=30.0, eps_max=5.0, gamma_max=0.5, coverage=1.0)
    server = Server(DIM, rule=rule)

    record = stepped(
        server,
        {i: drawn(90 + n, DIM) if n < 4 else (east if n % 2 else west) for n, i in enumerate(IDS)},
    )

    assert len(record.splits) == 1
    assert server.tree.position(IDS[0]) == 0  # it may find its way down later


def test_a_saved_server_remembers_which_clients_are_set_aside(tmp_path):
    server = Server(DIM, guard=Guard(max_clusters=7))
    stepped(server, {**by_id(similar_updates()), IDS[0]: drawn(9, DIM)})
    server.save(tmp_path)

    again = Server.load(tmp_path)

    assert again.options.guard == Guard(max_clusters=7)
    assert again.to_state()[0]["set_aside"] == [IDS[0]]


def test_a_client_that_leaves_is_forgotten():
    server = Server(DIM)
    stepped(server, {**by_id(similar_updates()), IDS[0]: drawn(9, DIM)})

    server.remove([IDS[0]])

    assert server.to_state()[0]["set_aside"] == []


@given(
    st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=12),
    st.floats(0.35, 1.0),
)
def test_no_share_is_above_the_cap_and_nothing_else_changes(weights, max_share):
    before = np.array(weights)

    after = capped_weights(before, max_share)

    assert (after <= before).all()
    assert after.max() <= max_share * after.sum() * (1 + 1e-9)
    is_lower = after < before
    assert len(set(np.round(after[is_lower] / after.max(), 9))) <= 1  # all of them at the cap
    if before.max() <= max_share * before.sum():
        assert np.array_equal(after, before)


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=12), st.floats(0.001, 1.0))
def test_a_cap_below_an_equal_share_makes_all_equal(weights, times):
    before = np.array(weights)

    after = capped_weights(before, times / len(weights))

    if times < 1:
        assert after.tolist() == [before.min()] * len(weights)
    assert (after > 0).all()


def test_a_client_that_claims_a_billion_examples_counts_for_half():
    updates = by_id(similar_updates(num_clients=10))
    server = Server(DIM)

    stepped(server, updates, {IDS[0]: 1e9})

    liar, others = updates[IDS[0]], np.mean([updates[i] for i in IDS[1:10]], axis=0)
    assert np.allclose(server.tree.root.params, (liar + others) / 2, atol=1e-4)


def test_no_split_makes_more_clusters_than_the_cap():
    directions = np.eye(12, dtype=np.float32)
    rule = Thresholds(eps_mean=1.0, eps_max=0.5, gamma_max=0.1)
    server = Server(12, rule=rule, guard=Guard(max_clusters=5))

    reasons = []
    for _ in range(20):
        record = stepped(server, {IDS[n]: directions[n] for n in range(12)})
        reasons += [decision.reason for decision in record.decisions]

    assert len(server.clusters) == 5
    assert any("more than max_clusters" in reason for reason in reasons)


def test_a_poisoned_update_does_not_attract_newcomers():
    tree = ParameterTree(DIM)
    east, west = (drawn(seed, DIM) for seed in (0, 1))
    groups = [
        {f"{name}{n}": pull + drawn(10 * n + len(name), DIM) for n in range(10)}
        for name, pull in (("a", east), ("bb", west))
    ]
    for group in groups:
        for client_id in group:
            tree.place(client_id, 0)
    groups[1]["bb0"] = east  # without noise: nearer to newcomers than their own group
    tree.split(0, groups)
    newcomer = east + drawn(99, DIM)

    assert tree.descend(0, newcomer).child_id == 2
    assert tree.descend(0, newcomer, ignored_share=0.1).child_id == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 1}, "max_length is 1.0; it must be above 1"),
        ({"clipped_length": 0}, "clipped_length is 0.0; it must be at least 1"),
        ({"clipped_length": 0.5}, "clipped_length is 0.5; it must be at least 1"),
        ({"max_share": 0}, "max_share is 0.0; it must be in"),
        ({"max_clusters": 0}, "max_clusters is 0; it must be at least 1"),
        ({"ignored_share": 0.6}, "ignored_share is 0.6; it must be in"),
        ({"num_best": 0}, "num_best is 0; it must be at least 1"),
    ],
)
def test_impossible_limits_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Guard(**settings)
