"""Examinations grouped into episodes, and measurements in words."""

from fedbranch import AutoRule, Decision, Thresholds
from fedbranch.report.facts.examinations import WORDS, episodes
from fedbranch.server.reviews import review
from fedbranch.testing.evidence import made_evidence, made_reviews


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


def test_words_are_made_of_any_number():
    assert all(worded(0.123456) for worded in WORDS.values())


def test_every_measurement_of_our_rules_has_words():
    rules = [
        AutoRule(),
        AutoRule(only_conflicts=True),
        Thresholds(eps_mean=1e30, eps_max=1e-30, gamma_max=1e-9),  # splits whatever it is shown
    ]
    decisions = [rule.examine(make()) for make in made_evidence().values() for rule in rules]
    for tree, losses in made_reviews().values():
        decisions.append(review(tree, rules[0], tree.root.id, 30, dict(losses)))
    measured = {name for made in decisions for name in made.measurements}

    assert {"num_overruled", "p_worse", "num_compared_in_full"} <= measured
    assert measured <= set(WORDS)
