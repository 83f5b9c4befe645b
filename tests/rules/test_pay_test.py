"""A split is made only if it pays for the clients."""

import numpy as np
import pytest

from fedbranch import AutoRule, Evidence
from rules.bowls import Bowls, verdicts


def test_a_split_that_does_not_pay_is_not_made():
    """The groups are real, but their clients measure losses on data of neither."""
    bowls = Bowls("ab" * 8, spread=0.3)
    bowls.losses = lambda client_id, trials: [1.0, 1.0 + 0.01 * (int(client_id[1:]) % 7)] * 2

    server, records = bowls.run(6)

    assert len(server.clusters) == 1
    reasons = [d.reason for r in records for d in r.decisions]
    assert any("does not pay" in reason for reason in reasons)


def proposal_of(*groups_of_gains):
    """Evidence of groups whose clients measured these gains; their updates do not contradict."""
    rng = np.random.default_rng(0)
    gains = {
        f"{g}-{n}": gain for g, own in enumerate(groups_of_gains) for n, gain in enumerate(own)
    }
    updates = (1 + 0.3 * rng.normal(size=(len(gains), 50))).astype(np.float32)
    return Evidence(
        node_id=0,
        round=3,
        client_ids=tuple(gains),
        updates=updates,
        weights=np.ones(len(gains)),
        mean_update=updates.mean(axis=0),
        num_members=len(gains),
        rounds_trained=2,
        rounds_held=1,
        rounds_since_hold=None,
        asked_for_halves=True,
        proposal=tuple(tuple(i for i in gains if i[0] == str(g)) for g in range(2)),
        losses={i: (1.0, 1.0 - gain) for i, gain in gains.items()},
    )


FEW_GAIN = ([0.1, 0.2], [0.3, 0.4])  # p = 1 / 16
ONE_GROUP_LOSES = ([0.1 * n for n in range(1, 15)], [-0.01, -0.02, -0.03])
NO_CLIENT_GAINS = ([-0.1, -0.2, -0.3], [-0.4, -0.5, -0.6])


@pytest.mark.parametrize(
    ("gains", "not_met"),
    [
        (FEW_GAIN, "p of at most 0.05"),
        (ONE_GROUP_LOSES, "a gain of the median client in every group"),
        (NO_CLIENT_GAINS, "p of at most 0.05 and a gain of the median client in every group"),
    ],
)
def test_a_split_that_does_not_pay_names_the_condition_that_failed(gains, not_met):
    decision = AutoRule().examine(proposal_of(*gains))

    assert decision.verdict == "train"
    assert "a split does not pay" in decision.reason
    assert decision.reason.endswith(f"; not met: {not_met}")


def test_without_losses_groups_that_the_halves_confirm_are_split():
    bowls = Bowls("ab" * 8)
    bowls.can_measure = False

    server, records = bowls.run(8)

    assert bowls.found(server)
    (split,) = [d for r in records for d in r.splits]
    assert "no client could measure" in split.reason


def test_without_halves_and_losses_only_a_wide_gap_counts():
    wide, narrow = (Bowls("ab" * 8, apart=3.0, spread=spread) for spread in (1.0, 20.0))
    for bowls in (wide, narrow):
        bowls.can_halve = bowls.can_measure = False

    assert wide.found(wide.run(4)[0])
    server, records = narrow.run(4)
    assert len(server.clusters) == 1
    assert "neither half updates nor losses" in records[-1].decisions[0].reason


def test_if_one_of_three_proposed_groups_leaves_the_others_are_split():
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(2)
    gone = [i for i, group in bowls.group_of.items() if group == "c"]
    server.remove(gone)
    for client_id in gone:
        del bowls.rows[client_id], bowls.group_of[client_id]

    _, records = bowls.run(4, server=server)

    assert bowls.found(server)
    assert verdicts(records).count("hold") <= 2


def test_if_a_whole_proposed_group_leaves_the_rest_trains_on():
    bowls = Bowls("a" * 18 + "bb")
    server, _ = bowls.run(2)
    server.remove(["c18", "c19"])
    del bowls.rows["c18"], bowls.rows["c19"]

    bowls.run(4, server=server)

    assert len(server.clusters) == 1
    assert server.tree.root.version > 2


def test_a_proposal_that_no_client_measures_and_that_few_are_left_of_is_dropped():
    updates = np.float32([[1, 0], [-1, 0]])
    evidence = Evidence(
        node_id=0,
        round=9,
        client_ids=("a", "b"),
        updates=updates,
        weights=np.ones(2),
        mean_update=np.zeros(2, np.float32),
        num_members=5,
        rounds_trained=3,
        rounds_held=2,
        rounds_since_hold=None,
        asked_for_halves=True,
        proposal=(("a",), ("b",)),
        rounds_proposed=2,
    )

    assert AutoRule().examine(evidence).verdict == "train"
