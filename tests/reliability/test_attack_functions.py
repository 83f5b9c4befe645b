"""What hostile clients send is what their papers say, and what the matrix measures is so."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import fedbranch as fb
from fedbranch.runs import Round
from fedbranch.server.records import RoundRecord
from reliability.attacks import (
    ATTACKS,
    TRIGGER_LABEL,
    Attackers,
    Deceived,
    exchanged,
    for_a_merge,
    largest_shift,
    triggered,
    with_backdoor,
    with_flipped_labels,
)
from reliability.matrix import Scene, federation, outcome, table, trained

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
def test_noise_is_new_every_time_and_as_long_as_said(attack, factor):
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
def test_min_max_goes_as_far_as_nobody_notices(seed):
    updates = make_updates(seed)
    honest = vectors(updates)
    apart = max(np.linalg.norm(one - other) for one in honest for other in honest)
    mean = honest.mean(axis=0)

    crafted = sent("min-max", updates)["y"].vector.astype(np.float64)

    farthest = np.linalg.norm(honest - crafted, axis=1).max()
    assert farthest == pytest.approx(apart, rel=1e-5)
    assert cosine(crafted - mean, -mean) == pytest.approx(1, abs=1e-5)


def test_mimics_copy_the_same_client_every_time():
    attackers = Attackers(ATTACKS["mimic"], HOSTILE, seed=0)
    for this_round in (1, 2):
        updates = make_updates(this_round, has_halves=True)

        replies = sent("mimic", updates, this_round=this_round, attackers=attackers)

        for client_id in HOSTILE:
            np.testing.assert_allclose(replies[client_id].vector, updates["a"].vector, atol=1e-6)
            np.testing.assert_allclose(
                replies[client_id].half_difference, updates["a"].half_difference, atol=1e-6
            )


def test_attackers_count_only_those_who_train_at_the_same_parameters():
    updates = make_updates(0, bases={"c": "other", "d": "other", "z": "other"})
    attackers = Attackers(ATTACKS["ipm"], HOSTILE, seed=0)
    sent("ipm", make_updates(1), attackers=attackers)

    replies = sent("ipm", updates, this_round=2, attackers=attackers)

    for client_id, honest in {"y": ("a", "b"), "z": ("c", "d")}.items():
        expected = -0.5 * vectors(updates, honest).mean(axis=0)
        np.testing.assert_allclose(replies[client_id].vector, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attack", ["alie", "ipm", "min-max", "mimic"])
def test_an_attacker_among_its_kind_has_nobody_to_look_at(attack):
    updates = make_updates(0, bases=dict.fromkeys(HOSTILE, "other"))

    replies = sent(attack, updates)

    assert all(replies[i] is updates[i] for i in HOSTILE)


def test_attackers_must_come_last():
    attackers = Attackers(ATTACKS["mimic"], ["b"], seed=0)

    with pytest.raises(ValueError, match="honest client 'c' comes after an attacker"):
        sent("mimic", make_updates(0), attackers=attackers)


def test_flipped_labels_are_flipped_everywhere():
    x = np.zeros((3, 1, 8, 8), dtype=np.float32)
    client = fb.ClientData((x, [0, 1, 9]), (x, [2, 3, 4]), validation=(x, [5, 6, 7]), group="g")

    flipped = with_flipped_labels(client)

    labels = [part.y.tolist() for part in (flipped.train, flipped.test, flipped.validation)]
    assert labels == [[9, 8, 0], [7, 6, 5], [4, 3, 2]]
    assert flipped.group == "g"


def test_a_backdoor_is_in_half_of_the_rows():
    x = np.full((4, 1, 8, 8), 0.5, dtype=np.float32)
    client = fb.ClientData((x, [5, 6, 7, 8]))

    poisoned = with_backdoor(client).train

    assert poisoned.y.tolist() == [TRIGGER_LABEL, TRIGGER_LABEL, 7, 8]
    assert [int((image == 1).sum()) for image in poisoned.x] == [4, 4, 0, 0]
    assert (client.train.x == 0.5).all()
    np.testing.assert_array_equal(triggered(x)[:2], poisoned.x[:2])


def test_liars_speak_against_a_split_and_for_a_merge():
    assert exchanged((1.0, 2.0, 3.0, 4.0)) == (2.0, 1.0, 4.0, 3.0)
    assert for_a_merge((2.0, 1.0, 3.0)) == (1.0, 3.0, 3.0)


def test_a_rule_without_liars_is_the_default_one():
    scene = Scene(40, 2, 0)
    honest, _ = federation(scene)

    (truth, _), (nobody_lies, _) = (
        trained(scene, honest, rule=rule) for rule in (fb.AutoRule(), Deceived())
    )
    all_lie, _ = trained(scene, honest, rule=Deceived(liars=frozenset(honest)))

    assert nobody_lies.history == truth.history
    assert len(truth.clusters) == 2
    assert len(all_lie.clusters) == 1


def test_a_federation_has_as_many_of_each_group_among_honest_and_hostile():
    honest, hostile = federation(Scene(40, 4, 0))

    assert sorted(client.group for client in honest.values()) == sorted("0123" * 3)
    assert sorted(client.group for client in hostile.values()) == sorted("0123" * 2)
    assert max(honest) < min(hostile)


# What the matrix measures


@dataclass
class FakeRun:
    """As much of a run as is looked at."""

    history: list[Round]
    evaluation: dict[str, dict[str, float]]
    clusters: dict[int, list[str]] = field(default_factory=dict)


def measured(refused, positions, honest_groups="ab", num_hostile=2):
    """Make up a run: for each round, who was refused (None: nobody was asked) and who is where."""
    honest = {
        f"c{n}": fb.ClientData((np.zeros((1, 1)), [0]), group=group)
        for n, group in enumerate(honest_groups)
    }
    hostile = {f"h{n}" for n in range(num_hostile)}
    history = [
        Round(
            record=RoundRecord(
                round=number,
                refused=dict.fromkeys(ids or (), "why"),
                metrics={} if ids is None else {i: {} for i in {*honest, *hostile} - {*ids}},
            ),
            num_visits=0,
            evaluation={},
        )
        for number, ids in enumerate(refused, start=1)
    ]
    evaluation = {i: {"accuracy": 0.5} for i in (*honest, *hostile)}
    return outcome(FakeRun(history, evaluation), positions, honest, hostile)


def test_attackers_that_are_refused_or_by_themselves_are_out():
    together, apart = {"c0": 0, "c1": 0, "h0": 0, "h1": 0}, {"c0": 1, "c1": 1, "h0": 1, "h1": 2}

    found = measured([[], ["h0"], ["h0"], ["h0"]], [together, together, apart, apart], "aa")

    assert found["recall"] == found["precision"] == 1
    assert found["out_by"] == 3
    assert found["share_out"] == 5 / 8
    assert found["num_honest_refused"] == 0


def test_attackers_that_come_back_are_not_out():
    together = {"c0": 0, "c1": 0, "h0": 0, "h1": 0}

    found = measured([["h0", "h1"], []], [together] * 2, "aa")

    assert found["recall"] == 0
    assert found["precision"] is None
    assert found["out_by"] == 1
    assert found["share_out"] == 0.5


def test_who_is_not_asked_stays_where_it_was():
    together = {"c0": 0, "c1": 0, "h0": 0, "h1": 0}

    found = measured([["h0", "h1"], None], [together] * 2, "aa")

    assert found["recall"] == found["share_out"] == 1


def test_honest_clients_that_are_refused_or_by_themselves_count_against_precision():
    apart = {"c0": 1, "c1": 1, "c2": 1, "c3": 2, "h0": 3, "h1": 3}

    found = measured([["c0"]], [apart], "aaaa")

    assert found["recall"] == 1
    assert found["precision"] == 0.5
    assert found["num_honest_refused"] == 1


def test_honest_groups_of_their_own_are_no_mistake():
    apart = {"c0": 1, "c1": 1, "c2": 2, "c3": 2, "h0": 2, "h1": 3}

    found = measured([[]], [apart], "aabb")

    assert found["precision"] == 1
    assert found["recall"] == 0.5
    assert found["out_by"] is None


def test_the_table_has_a_row_for_every_attack_and_share():
    methods = {
        "CFL": {
            "points_lost": 1.0,
            "precision": None,
            "recall": 0.5,
            "out_by": 3,
            "share_out": 0.5,
        },
        "FedAvg": {"accuracy": 0.1, "points_lost": 50.0},
    }
    results = [
        {"cell": {"attack": attack, "percent": 25, "num_groups": 1, "seed": 0}, "methods": methods}
        for attack in ("mimic", "alie")
    ]

    rows = table(results).splitlines()

    assert rows[-3:] == [
        "|---|---|---|---|---|---|---|---|",
        "| mimic | 25 | 1.0 (1.0) | – | 0.50 (0.50) | 3 (1/1) | 0.50 (0.50) | 50.0 (50.0) |",
        "| ALIE | 25 | 1.0 (1.0) | – | 0.50 (0.50) | 3 (1/1) | 0.50 (0.50) | 50.0 (50.0) |",
    ]
