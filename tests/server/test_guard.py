"""Hostile clients are set aside, capped and not believed; honest ones are left alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch import AutoRule, Evidence, Guard, ParameterTree, Review, Server, Thresholds, Update
from fedbranch.rules.credibility import least_agreement, opposed_groups, opposed_moves
from fedbranch.server.guard import capped_weights

DIM = 2000
IDS = [f"client-{number:02}" for number in range(20)]


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def similar_updates(seed=0, num_clients=20, noise=1.0):
    """Updates that have a direction in common."""
    return drawn(seed, DIM)[None, :] + noise * drawn(seed + 1, num_clients, DIM)


def stepped(server, updates, num_examples=None):
    """Let clients answer with these updates, by id; give the record."""
    server.plan(sorted(updates))
    counts = num_examples or {}
    return server.step({i: Update(u, counts.get(i, 10)) for i, u in updates.items()})


def by_id(updates):
    return dict(zip(IDS, updates, strict=False))


# Lengths


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
def test_one_client_that_shouts_cannot_stop_the_others_from_splitting(has_guard):
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


def test_nobody_is_set_aside_among_four():
    updates = by_id(similar_updates(num_clients=4))
    updates["client-03"] = 1e6 * updates["client-03"]

    assert not stepped(Server(DIM), updates).refused


def test_in_means_an_update_counts_with_a_few_times_the_usual_length():
    updates = similar_updates(num_clients=10)
    updates[0] *= -10  # against the others, so that it drags nobody along
    lengths = np.linalg.norm(updates, axis=1)
    server = Server(DIM)

    record = stepped(server, by_id(updates))

    updates[0] *= 4 * np.median(lengths) / lengths[0]
    assert not record.refused
    assert np.allclose(server.tree.root.params, updates.mean(axis=0), atol=1e-5)


def test_who_drags_all_others_along_is_set_aside_unless_it_has_more_data():
    updates = similar_updates(num_clients=10)
    updates[0] *= 10

    record = stepped(Server(DIM), by_id(updates))
    with_more_data = stepped(Server(DIM), by_id(updates), {IDS[0]: 30})

    assert list(record.refused) == [IDS[0]]
    assert not with_more_data.refused


def test_who_was_set_aside_for_its_length_comes_back_when_it_is_shorter():
    updates = similar_updates(num_clients=10)
    server = Server(DIM)

    refused = [
        list(stepped(server, by_id(np.concatenate([times * updates[:1], updates[1:]]))).refused)
        for times in (100, -10, 2)
    ]

    assert refused == [[IDS[0]], [IDS[0]], []]


def test_who_was_set_aside_does_not_say_what_is_usual():
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


# Strangers


def test_noise_among_similar_updates_is_set_aside():
    updates = by_id(similar_updates())
    noise = drawn(9, 8, DIM)
    for row, client_id in enumerate(IDS[:8]):
        updates[client_id] = noise[row]

    record = stepped(Server(DIM), updates)

    assert set(record.refused) == set(IDS[:8])
    assert "resembles no other" in record.refused[IDS[0]]


def test_a_stranger_comes_back_when_it_resembles_somebody():
    server = Server(DIM)
    updates = by_id(similar_updates())

    first = stepped(server, {**updates, IDS[0]: drawn(9, DIM)})
    second = stepped(server, updates)

    assert list(first.refused) == [IDS[0]]
    assert not second.refused


def test_a_stranger_is_not_routed_until_it_resembles_somebody():
    east, west = drawn(0, DIM), -drawn(0, DIM)
    rule = Thresholds(eps_mean=30.0, eps_max=5.0, gamma_max=0.5)
    server = Server(DIM, rule=rule)
    pull = {i: east if n % 2 else west for n, i in enumerate(IDS)}
    stepped(server, {**pull, IDS[0]: drawn(90, DIM)})  # which splits the others

    noise = stepped(server, {IDS[0]: drawn(91, DIM)})
    like_the_others = stepped(server, {IDS[0]: west})

    assert "still resembles no other" in noise.refused[IDS[0]]
    assert [move.client_id for move in like_the_others.routed] == [IDS[0]]


def test_in_few_dimensions_everybody_is_known():
    assert Guard().knows([0.01, -0.2], dim=10)
    assert not Guard().knows([0.01, -0.2], dim=10_000)


def test_a_group_that_conflicts_with_all_others_is_no_stranger():
    common = drawn(0, DIM)
    updates = by_id(similar_updates())
    for row, client_id in enumerate(IDS[:3]):
        updates[client_id] = drawn(50, DIM) + 0.2 * drawn(60 + row, DIM)  # unlike the others
    updates[IDS[3]] = -common  # unlike everybody, and no noise

    assert not stepped(Server(DIM), updates).refused


def test_where_nobody_resembles_anybody_nobody_is_a_stranger():
    assert not stepped(Server(DIM), by_id(drawn(3, 20, DIM))).refused


def test_in_few_dimensions_nobody_is_a_stranger():
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


def test_who_was_set_aside_is_remembered_by_a_saved_server(tmp_path):
    server = Server(DIM, guard=Guard(max_clusters=7))
    stepped(server, {**by_id(similar_updates()), IDS[0]: drawn(9, DIM)})
    server.save(tmp_path)

    again = Server.load(tmp_path)

    assert again.options.guard == Guard(max_clusters=7)
    assert again.to_state()[0]["set_aside"] == [IDS[0]]


def test_who_leaves_is_forgotten():
    server = Server(DIM)
    stepped(server, {**by_id(similar_updates()), IDS[0]: drawn(9, DIM)})

    server.remove([IDS[0]])

    assert server.to_state()[0]["set_aside"] == []


# Weights


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
def test_where_nobody_may_have_as_much_as_an_equal_share_all_become_equal(weights, times):
    before = np.array(weights)

    after = capped_weights(before, times / len(weights))

    if times < 1:
        assert after.tolist() == [before.min()] * len(weights)
    assert (after > 0).all()


def test_who_claims_a_billion_examples_counts_for_half():
    updates = by_id(similar_updates(num_clients=10))
    server = Server(DIM)

    stepped(server, updates, {IDS[0]: 1e9})

    liar, others = updates[IDS[0]], np.mean([updates[i] for i in IDS[1:10]], axis=0)
    assert np.allclose(server.tree.root.params, (liar + others) / 2, atol=1e-4)


# Clusters


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


# Routing


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


# Believing


def evidence_of(updates, groups, gains):
    ids = tuple(IDS[: len(updates)])
    return Evidence(
        node_id=0,
        round=3,
        client_ids=ids,
        updates=updates,
        weights=np.ones(len(ids)),
        mean_update=updates.mean(axis=0),
        num_members=len(ids),
        rounds_trained=2,
        rounds_held=1,
        rounds_since_hold=None,
        asked_for_halves=True,
        halved_rows=tuple(range(len(ids))),
        half_differences=0.1 * drawn(5, *updates.shape),
        proposal=tuple(tuple(IDS[row] for row in group) for group in groups),
        losses={i: (1.0, 1.0 - gain, 1.0, 1.0 - gain) for i, gain in zip(ids, gains, strict=True)},
    )


HONEST, FEW = range(13), range(13, 20)


def two_groups(cosine_sign):
    common = drawn(0, DIM)
    other = cosine_sign * common + 0.5 * drawn(1, DIM)
    return np.stack([common if n in HONEST else other for n in range(20)]) + 0.1 * drawn(2, 20, DIM)


def test_a_minority_that_contradicts_itself_cannot_keep_the_others_from_parting():
    gains = [0.1 + 0.001 * n if n in HONEST else -0.5 for n in range(20)]

    decision = AutoRule().examine(evidence_of(two_groups(-1), (HONEST, FEW), gains))

    assert decision.verdict == "split"
    assert decision.measurements["num_overruled"] == len(FEW)
    assert "updates contradict that" in decision.reason


def test_a_minority_whose_updates_agree_with_it_is_believed():
    gains = [0.1 + 0.001 * n if n in HONEST else -0.5 for n in range(20)]

    decision = AutoRule().examine(evidence_of(two_groups(+1), (HONEST, FEW), gains))

    assert decision.verdict == "train"


def test_a_majority_is_always_believed():
    gains = [-0.5 if n in HONEST else 0.1 + 0.001 * n for n in range(20)]

    decision = AutoRule().examine(evidence_of(two_groups(-1), (HONEST, FEW), gains))

    assert decision.verdict == "train"


def test_one_liar_in_a_group_cannot_veto():
    gains = [0.1 + 0.001 * n for n in range(20)]
    gains[3] = -1e5

    decision = AutoRule().examine(evidence_of(two_groups(-1), (HONEST, FEW), gains))

    assert decision.verdict == "split"


def test_random_directions_have_nothing_in_common_and_similar_ones_do():
    updates = similar_updates()
    updates[13:] = drawn(77, DIM)

    opposed = opposed_groups(evidence_of(updates, (HONEST, FEW), [0.0] * 20))
    alike = opposed_groups(evidence_of(similar_updates(), (HONEST, FEW), [0.0] * 20))

    assert opposed == [True, True]
    assert alike == [False, False]


def test_in_few_dimensions_only_a_negative_cosine_is_opposed():
    assert least_agreement(10) == 0
    assert 0 < least_agreement(10_000) < 0.05


def test_a_client_cannot_move_to_a_branch_that_its_update_pointed_away_from():
    east = drawn(0, DIM)
    cached = {1: {"a": east, "b": east + drawn(1, DIM)}, 2: {"c": -east, "d": 0.1 * east}}

    opposed = opposed_moves(cached)
    # The liar c claims that it would be much better off with leaf 1.
    losses = {"a": (1.0, 0.5, 1.0), "b": (1.0, 0.5, 1.0), "e": (1.0, 0.5, 1.0)}
    review = Review(
        node_id=0,
        round=5,
        rounds_since_split=2,
        clusters={1: ["a", "b", "e"], 2: ["c", "d"]},
        losses={**losses, "c": (1.0, 0.1, 1.0), "d": (1.0, 0.1, 1.0)},
        opposed=opposed,
    )

    assert opposed["c"] == frozenset({1})
    assert opposed["d"] == frozenset()
    assert AutoRule().review(review).moves == {"d": 1}


# Settings


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
def test_limits_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Guard(**settings)


def test_what_is_no_guard_is_refused():
    with pytest.raises(TypeError, match="guard is 3; pass a Guard"):
        Server(2, guard=3)
