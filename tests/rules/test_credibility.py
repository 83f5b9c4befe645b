"""Claims about losses count only if the client's updates do not contradict them."""

import numpy as np

from fedbranch import AutoRule, Evidence, Review
from fedbranch.rules.credibility import least_agreement, opposed_groups, opposed_moves

DIM = 2000


IDS = [f"client-{number:02}" for number in range(20)]


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def similar_updates(seed=0, num_clients=20, noise=1.0):
    """Return updates that have a direction in common."""
    return drawn(seed, DIM)[None, :] + noise * drawn(seed + 1, num_clients, DIM)


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


def test_a_minority_that_contradicts_itself_cannot_keep_the_others_from_parting():
    gains = [0.1 + 0.001 * n if n in HONEST else -0.5 for n in range(20)]

    decision = AutoRule().examine(evidence_of(two_groups(-1), (HONEST, FEW), gains))

    assert decision.verdict == "split"
    assert decision.measurements["num_overruled"] == len(FEW)
    assert "updates contradict that" in decision.reason


def test_a_claim_of_a_minority_counts_if_its_updates_agree():
    gains = [0.1 + 0.001 * n if n in HONEST else -0.5 for n in range(20)]

    decision = AutoRule().examine(evidence_of(two_groups(+1), (HONEST, FEW), gains))

    assert decision.verdict == "train"


def test_the_claim_of_a_majority_always_counts():
    gains = [-0.5 if n in HONEST else 0.1 + 0.001 * n for n in range(20)]

    decision = AutoRule().examine(evidence_of(two_groups(-1), (HONEST, FEW), gains))

    assert decision.verdict == "train"


def test_one_liar_in_a_group_cannot_veto():
    gains = [0.1 + 0.001 * n for n in range(20)]
    gains[3] = -1e5

    decision = AutoRule().examine(evidence_of(two_groups(-1), (HONEST, FEW), gains))

    assert decision.verdict == "split"
