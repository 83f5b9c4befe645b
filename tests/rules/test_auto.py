"""AutoRule through the server: groups are found early, at once, and only where they are."""

import numpy as np
import pytest

from fedbranch import AutoRule, Server
from rules.bowls import DIM, Bowls, verdicts


@pytest.mark.parametrize("groups", ["ab" * 6, "abcd" * 4, "a" * 18 + "bb", "a" * 19 + "b"])
def test_all_groups_are_split_at_once_and_early(groups):
    bowls = Bowls(groups)

    server, records = bowls.run(8)

    assert bowls.found(server)
    assert sum(len(record.splits) for record in records) == 1
    assert records[2].splits  # trained, examined, measured


@pytest.mark.parametrize("seed", range(5))
def test_clients_of_one_group_stay_together(seed):
    bowls = Bowls("a" * 20, spread=5.0, seed=seed)

    server, records = bowls.run(40)

    assert len(server.clusters) == 1
    assert "split" not in verdicts(records)


def test_clients_that_are_all_different_stay_together():
    bowls = Bowls([str(i) for i in range(20)], spread=0.5)

    server, _ = bowls.run(20)

    assert len(server.clusters) == 1


def test_an_examination_costs_one_exchange_and_one_double_upload():
    bowls = Bowls("ab" * 6)
    server = Server(DIM)
    server.join(sorted(bowls.rows))
    asked = []
    for _ in range(4):
        tasks = server.plan(sorted(bowls.rows))
        trials = server.trials(sorted(bowls.rows))
        asked.append((len(tasks), {t.halves is not None for t in tasks.values()}, len(trials)))
        server.step(
            {i: bowls.update(i, task) for i, task in tasks.items()},
            losses={i: bowls.losses(i, own) for i, own in trials.items()},
        )

    assert asked == [(12, {False}, 0), (12, {True}, 0), (0, set(), 12), (12, {False}, 0)]


def test_the_mean_of_the_half_updates_trains():
    bowls = Bowls("a" * 10)
    server, _ = bowls.run(2)
    plain, _ = Bowls("a" * 10).run(2, rule=AutoRule(coverage=1.0))

    assert server.tree.root.version == 2
    assert np.array_equal(server.tree.root.params, plain.tree.root.params)


def test_a_client_that_did_not_answer_is_routed_to_its_group_later():
    bowls = Bowls("ab" * 10)
    server, _ = bowls.run(4, asked=lambda ids, _: ids[:-2])
    assert len(server.clusters) == 2
    assert not bowls.found(server)

    bowls.run(1, server=server)

    assert bowls.found(server)


def test_two_clients_are_never_split():
    server, records = Bowls("ab").run(10)

    assert len(server.clusters) == 1
    assert all("fewer than three" in d.reason for r in records for d in r.decisions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error_level": 0}, "error_level is 0.0; it must be a number in (0, 0.5)"),
        ({"coverage": 1.5}, "coverage is 1.5"),
        ({"max_hold_rounds": 0}, "max_hold_rounds is 0"),
        ({"review_after": (5, 5)}, "review_after is (5, 5); it must be positive and ascending"),
        ({"review_after": (0,)}, "review_after is (0,)"),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        AutoRule(**settings)


def test_only_conflicts_is_true_or_false():
    with pytest.raises(TypeError, match="only_conflicts is 'no'"):
        AutoRule(only_conflicts="no")
