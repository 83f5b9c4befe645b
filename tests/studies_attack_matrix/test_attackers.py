"""Hostile clients send what their papers say."""

import numpy as np
import pytest

import fedbranch as fb
from studies.attack_matrix.attackers import ATTACKS, Attackers
from studies.attack_matrix.crafted_updates import largest_shift

HONEST = ("a", "b", "c", "d")
HOSTILE = ("y", "z")
DIM = 200


def make_updates(seed, *, has_halves=False, bases=None):
    rng = np.random.default_rng(seed)
    bases = bases or {}
    common = rng.normal(size=DIM)
    return {
        client_id: fb.Update(
            (common + rng.normal(size=DIM)).astype(np.float32),
            num_examples=10,
            base=bases.get(client_id, "root"),
            half_difference=rng.normal(size=DIM).astype(np.float32) if has_halves else None,
        )
        for client_id in (*HONEST, *HOSTILE)
    }


def sent(attack, updates, *, this_round=1, attackers=None):
    if attackers is None:
        attackers = Attackers(ATTACKS[attack], HOSTILE, seed=0)
    return {i: attackers(i, this_round, updates[i]) for i in sorted(updates)}


def vectors(updates, client_ids=HONEST):
    return np.array([updates[i].vector for i in client_ids], dtype=np.float64)


def halves(update):
    return update.vector + update.half_difference, update.vector - update.half_difference


def cosine(one, other):
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("has_halves", [False, True])
def test_honest_clients_send_what_they_learned(attack, has_halves):
    updates = make_updates(0, has_halves=has_halves)

    replies = sent(attack, updates)

    assert all(replies[i] is updates[i] for i in HONEST)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attacker_answers_on_halves_as_it_would_on_each(attack):
    updates = make_updates(0, has_halves=True)
    replies = sent(attack, updates)
    if attack.startswith("gaussian"):  # every draw is another
        assert abs(cosine(*halves(replies["y"]))) < 0.3
        return
    for which in (0, 1):
        as_whole = {
            i: fb.Update(halves(u)[which], num_examples=10, base=u.base) for i, u in updates.items()
        }

        on_one_half = sent(attack, as_whole)

        for client_id in HOSTILE:
            np.testing.assert_allclose(
                halves(replies[client_id])[which],
                on_one_half[client_id].vector,
                rtol=1e-4,
                atol=1e-5,
            )


@pytest.mark.parametrize(
    ("attack", "factor"), [("sign-flip", -1), ("times-10", 10), ("times-100", 100), ("backdoor", 3)]
)
def test_multiples_of_the_own_update(attack, factor):
    updates = make_updates(0)

    replies = sent(attack, updates)

    for client_id in HOSTILE:
        np.testing.assert_allclose(
            replies[client_id].vector, factor * updates[client_id].vector, rtol=1e-6
        )


@pytest.mark.parametrize(("attack", "factor"), [("gaussian", 1), ("gaussian-10", 10)])
def test_noise_is_new_in_each_round_and_has_the_stated_length(attack, factor):
    updates = make_updates(0)

    first, second = (sent(attack, updates, this_round=n) for n in (1, 2))
    noises = [replies[i].vector for replies in (first, second) for i in HOSTILE]

    for client_id in HOSTILE:
        length = np.linalg.norm(updates[client_id].vector)
        assert np.linalg.norm(first[client_id].vector) == pytest.approx(factor * length, rel=1e-5)
    similarity = np.corrcoef(noises) - np.eye(4)
    assert np.abs(similarity).max() < 0.3
    np.testing.assert_array_equal(sent(attack, updates)["y"].vector, first["y"].vector)


def test_a_common_direction_is_the_same_for_all_attackers_and_rounds():
    first = sent("direction", make_updates(0))
    later = sent("direction", make_updates(1), this_round=7)

    assert cosine(first["y"].vector, later["z"].vector) == pytest.approx(1, abs=1e-5)
    own = make_updates(1)["z"].vector
    assert np.linalg.norm(later["z"].vector) == pytest.approx(np.linalg.norm(own), rel=1e-5)


def test_the_shift_of_a_little_is_enough_is_the_papers():
    assert largest_shift(50, 24) == pytest.approx(1.426, abs=1e-3)  # its own example
    assert largest_shift(20, 8) == pytest.approx(0.6745, abs=1e-4)  # Φ(z) = 9 / 12
    assert largest_shift(20, 2) == 0
    assert largest_shift(10, 8) == 0  # of two honest clients one is enough: Φ(z) = 1 / 2


def test_a_little_is_enough_stays_near_the_honest_mean():
    updates = make_updates(0)
    attackers = Attackers(ATTACKS["alie"], [f"z{i}" for i in range(3)], seed=0)
    updates |= {f"z{i}": updates["z"] for i in range(3)}
    del updates["y"], updates["z"]

    replies = sent("alie", updates, attackers=attackers)

    honest = vectors(updates)
    shift = largest_shift(7, 3)
    assert shift > 0.6
    np.testing.assert_allclose(
        replies["z1"].vector, honest.mean(axis=0) - shift * honest.std(axis=0), rtol=1e-4, atol=1e-5
    )


def test_inner_product_manipulation_points_away_from_the_honest_mean():
    updates = make_updates(0)

    replies = sent("ipm", updates)

    expected = -0.5 * vectors(updates).mean(axis=0)
    np.testing.assert_allclose(replies["y"].vector, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_min_max_stays_as_near_as_honest_updates_are_to_each_other(seed):
    updates = make_updates(seed)
    honest = vectors(updates)
    apart = max(np.linalg.norm(one - other) for one in honest for other in honest)
    mean = honest.mean(axis=0)

    crafted = sent("min-max", updates)["y"].vector.astype(np.float64)

    farthest = np.linalg.norm(honest - crafted, axis=1).max()
    assert farthest == pytest.approx(apart, rel=1e-5)
    assert cosine(crafted - mean, -mean) == pytest.approx(1, abs=1e-5)


def test_mimics_copy_the_same_client_in_all_rounds():
    attackers = Attackers(ATTACKS["mimic"], HOSTILE, seed=0)
    for this_round in (1, 2):
        updates = make_updates(this_round, has_halves=True)

        replies = sent("mimic", updates, this_round=this_round, attackers=attackers)

        for client_id in HOSTILE:
            np.testing.assert_allclose(replies[client_id].vector, updates["a"].vector, atol=1e-6)
            np.testing.assert_allclose(
                replies[client_id].half_difference, updates["a"].half_difference, atol=1e-6
            )


def test_attackers_use_only_clients_that_train_at_the_same_parameters():
    updates = make_updates(0, bases={"c": "other", "d": "other", "z": "other"})
    attackers = Attackers(ATTACKS["ipm"], HOSTILE, seed=0)
    sent("ipm", make_updates(1), attackers=attackers)

    replies = sent("ipm", updates, this_round=2, attackers=attackers)

    for client_id, honest in {"y": ("a", "b"), "z": ("c", "d")}.items():
        expected = -0.5 * vectors(updates, honest).mean(axis=0)
        np.testing.assert_allclose(replies[client_id].vector, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attack", ["alie", "ipm", "min-max", "mimic"])
def test_an_attacker_without_honest_clients_at_its_parameters_sends_what_it_learned(attack):
    updates = make_updates(0, bases=dict.fromkeys(HOSTILE, "other"))

    replies = sent(attack, updates)

    assert all(replies[i] is updates[i] for i in HOSTILE)


def test_attackers_must_come_last():
    attackers = Attackers(ATTACKS["mimic"], ["b"], seed=0)

    with pytest.raises(ValueError, match="honest client 'c' comes after an attacker"):
        sent("mimic", make_updates(0), attackers=attackers)
