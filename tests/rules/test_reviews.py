"""Some rounds after a split, it is kept, merged back, or some clients move."""

import math

from fedbranch import AutoRule, Review
from rules.bowls import Bowls, verdicts


def test_a_split_is_merged_back_if_it_did_not_pay():
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(3)
    leaves = server.tree.leaves
    assert len(leaves) == 2
    bowls.losses = lambda _, trials: [1.0, *[2.0] * (len(trials) - 1)]

    _, records = bowls.run(5, server=server)

    merges = [d for r in records for d in r.decisions if d.verdict == "merge"]
    assert [d.node_id for d in merges] == [0]
    assert server.tree.root.is_leaf
    assert server.tree.members(0) == sorted(bowls.rows)
    _, records = bowls.run(4, server=server)
    assert "split" not in verdicts(records)  # not at once again


def test_a_good_split_is_kept():
    _, records = Bowls("ab" * 8).run(30)

    assert verdicts(records).count("keep") == 3
    assert "merge" not in verdicts(records)


def test_a_client_in_the_wrong_group_is_moved():
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(3)
    wrong = next(i for i in server.clusters if "c00" not in server.clusters[i])
    server.tree.place("c00", wrong)
    assert not bowls.found(server)

    _, records = bowls.run(5, server=server)

    assert bowls.found(server)
    assert [set(d.moves) for r in records for d in r.decisions if d.moves] == [{"c00"}]


def test_no_client_is_moved_where_all_models_are_alike():
    losses = {f"c{i}": (1.0, 0.9 + 0.01 * i, 0.95 - 0.01 * i) for i in range(8)}
    clusters = {1: [f"c{i}" for i in range(4)], 2: [f"c{i}" for i in range(4, 8)]}
    review = Review(node_id=0, round=9, rounds_since_split=5, clusters=clusters, losses=losses)

    assert AutoRule().review(review).moves == {}


def test_losses_that_are_not_finite_count_as_the_largest_loss():
    def decision(own):
        return AutoRule().review(
            Review(
                node_id=0,
                round=9,
                rounds_since_split=5,
                clusters={1: [f"c{i}" for i in range(8)], 2: ["d"]},
                losses={f"c{i}": (1.0, own, 3.0) for i in range(8)},
            )
        )

    assert decision(1e9).verdict == decision(math.nan).verdict == "merge"
    assert decision(math.inf).verdict == "merge"
    assert decision(0.5).verdict == "keep"
