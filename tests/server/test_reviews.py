"""Splits are reviewed: one at a time on a path, with moves inside the split only."""

from dataclasses import replace

import pytest

from fedbranch import AutoRule, Decision
from rules.bowls import Bowls


class Mover(AutoRule):
    def review(self, review):
        moves = {next(iter(review.losses)): 99}
        return replace(super().review(review), moves=moves)


def test_a_rule_cannot_move_clients_out_of_the_split():
    with pytest.raises(ValueError, match="99"):
        Bowls("ab" * 8).run(10, rule=Mover())


class Undecided:
    """A rule that splits off one client at a time, and merges every split at its review."""

    review_after = (3, 4)

    def examine(self, evidence):
        ids = evidence.client_ids
        if evidence.round in (2, 3) and len(ids) > 1:
            groups = (ids[:1], ids[1:])
            return Decision(
                node_id=evidence.node_id,
                round=evidence.round,
                verdict="split",
                reason="",
                groups=groups,
            )
        return Decision(node_id=evidence.node_id, round=evidence.round, verdict="train", reason="")

    def review(self, review):
        return Decision(node_id=review.node_id, round=review.round, verdict="merge", reason="")


def test_a_split_within_a_split_under_review_is_not_reviewed():
    bowls = Bowls("a" * 6)

    server, records = bowls.run(12, rule=Undecided())

    assert [d.node_id for r in records for d in r.decisions if d.verdict == "merge"] == [0]
    assert server.tree.root.is_leaf
