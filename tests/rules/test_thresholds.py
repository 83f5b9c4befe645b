"""The paper's criteria: at their edges, with partial participation, and by sketches."""

import numpy as np
import pytest

from fedbranch import (
    Thresholds,
    bipartition,
    cosine_similarity,
)
from rules.made_evidence import evidence, planted, sketched

RULE = Thresholds(eps_mean=0.4, eps_max=1.6, gamma_max=0.5)


OPPOSED = [[2, 0], [2, 0.1], [-2, 0], [-2, -0.1]]


def test_a_stationary_cluster_whose_clients_pull_apart_is_split():
    decision = RULE.examine(evidence(OPPOSED))

    assert decision.verdict == "split"
    assert decision.groups == (("c0", "c1"), ("c2", "c3"))
    assert decision.measurements["mean_norm"] == pytest.approx(0)
    assert decision.measurements["max_norm"] == pytest.approx(np.hypot(2, 0.1))
    assert decision.measurements["cross_similarity"] == pytest.approx(-0.99875, abs=1e-4)
    assert (decision.node_id, decision.round) == (0, 7)


@pytest.mark.parametrize(
    ("rule", "updates", "reason"),
    [
        (RULE, [[2, 0], [2, 0.1]], "not stationary"),
        (RULE, [[1.5, 0], [-1.5, 0]], "congruent"),
        (RULE, [[0.1, 0]], "single client"),
        # Two that are still similar cannot have a short mean and long updates, four can.
        (Thresholds(eps_mean=9, eps_max=1, gamma_max=0.5), [[2, 0], [2, 0.1]], "too similar"),
        (
            Thresholds(eps_mean=0.4, eps_max=1.6, gamma_max=0.5, min_cluster_size=3),
            OPPOSED,
            "too small: the best split leaves 2",
        ),
        (Thresholds(eps_mean=0.4, eps_max=1.6, gamma_max=0.5, min_rounds=11), OPPOSED, "young"),
    ],
)
def test_a_cluster_that_fails_a_criterion_trains_on_and_the_reason_names_it(rule, updates, reason):
    decision = rule.examine(evidence(updates))

    assert decision.verdict == "train"
    assert decision.reason.startswith(reason) or reason in decision.reason
    assert "\n" not in decision.reason
    assert decision.groups == ()
    assert {"mean_norm", "max_norm"} <= decision.measurements.keys()


def test_the_criteria_at_their_edges():
    # ‖mean‖ < ε1 is strict, max ≥ ε2 is not, γ_max < tolerated is strict.
    updates = [[2, 0], [-1, 0]]  # mean 0.5, longest 2, cross-similarity -1: tolerates 1

    def verdict(**changes):
        settings = {"eps_mean": 0.51, "eps_max": 2.0, "gamma_max": 0.5, **changes}
        return Thresholds(**settings).examine(evidence(updates)).verdict

    assert verdict() == "split"
    assert verdict(eps_mean=0.5) == "train"
    assert verdict(eps_max=2.01) == "train"
    assert (
        Thresholds(eps_mean=9, eps_max=1, gamma_max=np.sqrt(0.5))
        .examine(evidence([[2, 0], [0, 2]]))
        .reason.startswith("too similar")
    )


def test_the_longest_update_is_measured_by_its_length_not_its_largest_entry():
    decision = RULE.examine(evidence([[1.2, 1.2], [-1.2, -1.2]]))

    assert decision.measurements["max_norm"] == pytest.approx(1.2 * np.sqrt(2))
    assert decision.verdict == "split"


def test_weights_count_in_the_stationarity_test():
    updates = [[3, 0], [-1, 0], [-1, 0], [-1, 0]]

    assert RULE.examine(evidence(updates)).verdict == "split"
    assert RULE.examine(evidence(updates, weights=[9, 1, 1, 1])).reason.startswith("not stationary")


FULL_COVERAGE = Thresholds(
    eps_mean=0.4, eps_max=1.6, gamma_max=0.5, coverage=1.0, max_hold_rounds=3
)


def test_a_cluster_holds_until_enough_have_answered():
    partial = evidence(OPPOSED, num_members=5)

    assert FULL_COVERAGE.examine(partial).verdict == "hold"
    assert RULE.examine(partial).verdict == "split"  # four of five are the default's 80 %


def test_a_cluster_does_not_hold_for_ever_nor_at_once_again():
    def verdict(**when):
        return FULL_COVERAGE.examine(evidence(OPPOSED, num_members=5, **when)).verdict

    assert verdict(rounds_held=2) == "hold"
    assert verdict(rounds_held=3) == "train"
    assert verdict(rounds_since_hold=2) == "train"
    assert verdict(rounds_since_hold=3) == "hold"


def test_while_it_holds_the_norms_of_a_part_decide_nothing():
    moving = evidence([[2, 0], [2, 0.1]], num_members=5, rounds_held=1)

    assert FULL_COVERAGE.examine(moving).verdict == "hold"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps_mean": 0}, "eps_mean is 0"),
        ({"eps_max": -1}, "eps_max is -1"),
        ({"eps_max": float("nan")}, "eps_max is nan"),
        ({"gamma_max": 1}, "gamma_max is 1"),
        ({"min_cluster_size": 0}, "min_cluster_size is 0"),
        ({"coverage": 0}, "coverage is 0"),
        ({"coverage": 1.5}, "coverage is 1.5"),
        ({"max_hold_rounds": 0}, "max_hold_rounds is 0"),
        ({"min_rounds": -1}, "min_rounds is -1"),
    ],
)
def test_impossible_thresholds_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Thresholds(**{"eps_mean": 0.4, "eps_max": 1.6, "gamma_max": 0.5, **changes})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("num_groups", "noise"), [(2, 0.3), (2, 1.5), (3, 0.5), (4, 1.0), (8, 0.5)]
)
@pytest.mark.parametrize("gamma_max", [0.3, 0.7, 0.75])
def test_sketches_decide_as_whole_updates_do(seed, num_groups, noise, gamma_max):
    whole = planted(seed, num_groups, noise)
    rule = Thresholds(eps_mean=40, eps_max=20, gamma_max=gamma_max)

    by_whole = rule.examine(whole)
    by_sketches = rule.examine(sketched(whole, seed=seed))

    assert by_sketches.verdict == by_whole.verdict
    assert by_sketches.groups == by_whole.groups


def test_a_clear_split_is_made_by_sketches_and_the_edges_of_their_tree():
    found = sketched(planted(0, 2, 0.3), size=1024)

    decision = Thresholds(eps_mean=40, eps_max=20, gamma_max=0.5).examine(found)

    assert decision.verdict == "split"
    assert decision.measurements["num_compared_in_full"] == 39
    assert 0 < decision.measurements["similarity_error"] < 0.2


def test_where_sketches_leave_it_open_pairs_are_compared_in_full():
    whole = planted(0, 4, 0.5)
    found = sketched(whole)

    decision = Thresholds(eps_mean=40, eps_max=20, gamma_max=0.5).examine(found)

    exact = bipartition(cosine_similarity(whole.updates)).cross_similarity
    assert decision.measurements["cross_similarity"] == pytest.approx(exact, abs=1e-6)
    assert decision.measurements["num_compared_in_full"] > 39


@pytest.mark.parametrize("seed", range(12))
def test_updates_with_a_heavy_coordinate_are_decided_about_as_in_full(seed):
    # Two that share a bucket resemble each other by mistake, by far more than is typical.
    num_clients, dim = 50, 20_000
    rng = np.random.default_rng(seed)
    pull = rng.normal(size=dim)
    pull /= np.linalg.norm(pull)
    updates = np.where(np.arange(num_clients)[:, None] % 2, pull, -pull)
    updates[np.arange(num_clients), rng.choice(dim, num_clients, replace=False)] += 1
    whole = evidence(updates)
    rule = Thresholds(eps_mean=0.5, eps_max=0.5, gamma_max=0.806)

    by_whole, by_sketches = rule.examine(whole), rule.examine(sketched(whole, size=64))

    assert by_sketches.verdict == by_whole.verdict == "split"
    assert by_sketches.groups == by_whole.groups


@pytest.mark.parametrize("most", [0, 8192])
def test_where_too_many_pairs_may_decide_all_are_compared(monkeypatch, most):
    monkeypatch.setattr("fedbranch.rules.thresholds.MOST_REFINED", most)
    whole = planted(0, 1, 1.0)

    decision = Thresholds(eps_mean=40, eps_max=20, gamma_max=0.7).examine(sketched(whole, size=64))

    exact = bipartition(cosine_similarity(whole.updates)).cross_similarity
    assert decision.measurements["cross_similarity"] == pytest.approx(exact, abs=1e-6)
    assert decision.measurements["num_compared_in_full"] == 40 * 39 / 2


def test_sketches_of_updates_that_are_gone_decide_alone():
    found = sketched(planted(0, 4, 0.5), size=2048, is_kept=False)

    decision = Thresholds(eps_mean=40, eps_max=20, gamma_max=0.5).examine(found)

    assert decision.verdict == "split"
    assert "num_compared_in_full" not in decision.measurements
