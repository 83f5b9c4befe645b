"""Recall, precision and the rounds in which attackers are out, worked out by hand."""

from dataclasses import dataclass, field

import numpy as np

import fedbranch as fb
from fedbranch.runs import Round
from studies.attack_matrix.outcome import outcome


@dataclass
class FakeRun:
    """The parts of a run that the outcome reads."""

    history: list[Round]
    evaluation: dict[str, dict[str, float]]
    clusters: dict[int, list[str]] = field(default_factory=dict)


def measured(refused, positions, honest_groups="ab", num_hostile=2):
    """Make up a run from the refused ids (None: no client was asked) and positions of each round."""
    honest = {
        f"c{n}": fb.ClientData((np.zeros((1, 1)), [0]), group=group)
        for n, group in enumerate(honest_groups)
    }
    hostile = {f"h{n}" for n in range(num_hostile)}
    history = [
        Round(
            record=fb.RoundRecord(
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


def test_a_client_that_is_not_asked_stays_out_or_in():
    together = {"c0": 0, "c1": 0, "h0": 0, "h1": 0}

    found = measured([["h0", "h1"], None], [together] * 2, "aa")

    assert found["recall"] == found["share_out"] == 1


def test_honest_clients_that_are_refused_or_by_themselves_count_against_precision():
    apart = {"c0": 1, "c1": 1, "c2": 1, "c3": 2, "h0": 3, "h1": 3}

    found = measured([["c0"]], [apart], "aaaa")

    assert found["recall"] == 1
    assert found["precision"] == 0.5
    assert found["num_honest_refused"] == 1


def test_clusters_of_honest_groups_do_not_count_against_precision():
    apart = {"c0": 1, "c1": 1, "c2": 2, "c3": 2, "h0": 2, "h1": 3}

    found = measured([[]], [apart], "aabb")

    assert found["precision"] == 1
    assert found["recall"] == 0.5
    assert found["out_by"] is None
