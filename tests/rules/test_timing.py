"""When examinations begin, and how long a cluster stands still for them."""

from dataclasses import replace

import numpy as np
import pytest

from fedbranch import Server
from fedbranch.rules.draft import Draft
from fedbranch.rules.timing import num_needed, wait_for_replies, wait_for_time
from rules.bowls import DIM, Bowls, verdicts
from rules.made_evidence import evidence


def test_examinations_without_a_result_become_rare():
    _, records = Bowls("a" * 20, spread=20.0).run(100)

    examined = [r.round for r in records for d in r.decisions if "p_structure" in d.measurements]
    gaps = np.diff(examined)
    assert examined[0] == 2
    assert len(examined) <= 14
    assert gaps[-1] >= 10


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_with_few_clients_in_a_round_the_cluster_stands_still_for_the_others(share):
    bowls = Bowls("ab" * 8)
    rng = np.random.default_rng(0)

    def some(ids, server):
        awaited = [i for i in server.awaited() if i in ids]
        others = [i for i in ids if i not in awaited]
        rng.shuffle(others)
        return sorted([*awaited, *others][: round(share * len(ids))])

    server, records = bowls.run(60, asked=some)

    assert bowls.found(server)
    assert "hold" in verdicts(records)


def test_a_client_that_leaves_during_an_examination_is_not_waited_for():
    bowls = Bowls("ab" * 6)
    server, _ = bowls.run(2)
    server.remove(["c00", "c01"])
    del bowls.rows["c00"], bowls.rows["c01"]

    bowls.run(1, server=server)

    assert len(server.clusters) == 2
    assert sum(map(len, server.clusters.values())) == 10


def test_a_cluster_does_not_stand_still_for_ever_while_clients_come_and_go():
    bowls = Bowls("ab" * 10)
    server = Server(DIM)
    leaving = iter(sorted(bowls.rows)[:12])

    def some(ids, server):
        client_id = next(leaving, None)
        if client_id is not None and client_id in server.tree:
            server.remove([client_id])
            del bowls.rows[client_id]
        return [i for i in ids if i in bowls.rows]

    bowls.run(30, server=server, asked=some)

    assert server.tree.root.version > 1 or not server.tree.root.is_leaf


def test_splits_that_never_pay_become_rare():
    bowls = Bowls("ab" * 8)
    honest = bowls.losses
    bowls.losses = lambda i, trials: (
        honest(i, trials) if trials[0].halves else [1.0, *[2.0] * (len(trials) - 1)]
    )

    _, records = bowls.run(300)

    merges = [r.round for r in records for d in r.decisions if d.verdict == "merge"]
    gaps = np.diff(merges)
    assert len(merges) <= 6
    assert (np.diff(gaps) > 0).all()


# By hand


@pytest.mark.parametrize(
    ("num_members", "needed"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (10, 8), (62, 50), (10**6, 50)],
)
def test_of_large_clusters_fifty_clients_are_enough(num_members, needed):
    assert num_needed(0.8, num_members) == needed


def rounds_to_wait(**about):
    """Return after how many rounds of training the next examination begins."""
    seen = evidence([[1, 0], [0, 1], [1, 1]])
    for since in range(1000):
        decision = wait_for_time(Draft(replace(seen, rounds_since_examined=since, **about)))
        assert not decision.is_examination
        if decision.asks == "halves":
            return since + 1
    raise AssertionError


def test_the_first_examination_begins_after_the_first_round():
    decision = wait_for_time(Draft(evidence([[1, 0], [0, 1], [1, 1]])))

    assert (decision.verdict, decision.asks) == ("train", "halves")


def test_waits_become_half_as_long_again_up_to_25_rounds():
    waits = [rounds_to_wait(num_examined=number) for number in range(1, 11)]

    assert waits == [2, 3, 4, 6, 8, 12, 18, 25, 25, 25]


def test_merged_splits_double_the_longest_wait():
    assert [rounds_to_wait(num_examined=60, num_merged=n) for n in range(4)] == [25, 50, 100, 200]


@pytest.mark.parametrize(("p_value", "wait"), [(0.005, 2), (0.011, 25), (0.5, 25)])
def test_after_a_close_call_the_wait_is_two_rounds(p_value, wait):
    measured = {"p_structure": p_value, "p_structure_needed": 0.001}

    assert rounds_to_wait(num_examined=60, last_measured=measured) == wait


def test_a_leaf_trains_thrice_the_rounds_that_it_stood_still():
    assert rounds_to_wait(num_examined=1, rounds_held_for_it=5) == 15


@pytest.mark.parametrize(
    ("num_answered", "rounds_held", "num_new", "verdict"),
    [
        (7, 0, 7, "hold"),  # 8 are needed
        (7, 9, 0, "hold"),
        (7, 10, 7, "train"),  # in vain
        (8, 1, 2, "hold"),  # enough, but replies still arrive
        (8, 1, 0, None),
        (10, 1, 5, None),  # all of them
        (8, 10, 1, None),
        (10, 20, 0, "train"),  # proposals came to nothing
    ],
)
def test_a_leaf_stands_still_while_replies_are_missing_or_still_arrive(
    num_answered, rounds_held, num_new, verdict
):
    seen = replace(
        evidence(np.eye(num_answered), num_members=10, rounds_held=rounds_held), num_new=num_new
    )

    decision = wait_for_replies(Draft(seen), coverage=0.8, max_hold_rounds=10)

    assert (decision and decision.verdict) == verdict
