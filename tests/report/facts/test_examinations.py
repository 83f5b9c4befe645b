"""Examinations grouped into episodes, and measurements in words."""

from fedbranch import Decision
from fedbranch.report.facts.examinations import WORDS, episodes


def decision(number, reason, *, node_id=0, verdict="train", **measurements):
    return Decision(
        node_id=node_id, round=number, verdict=verdict, reason=reason, measurements=measurements
    )


def test_rounds_that_differ_in_numbers_only_are_one_episode():
    found = list(
        episodes(
            [
                decision(1, "not stationary: 0.5"),
                decision(1, "not stationary: 0.7", node_id=1),
                decision(2, "not stationary: 3e-05"),
                decision(3, "too similar: 0.5"),
                decision(4, "not stationary: 0.5"),
            ]
        )
    )

    assert [[d.round for d in episode.decisions] for episode in found] == [[1, 2], [1], [3], [4]]


def test_every_measurement_has_words():
    assert all(worded(0.123456) for worded in WORDS.values())
