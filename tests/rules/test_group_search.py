"""Groups are found by half updates, or by the gap between similarities."""

import numpy as np
import pytest

from fedbranch.core.geometry import cosine_similarity
from rules.bowls import Bowls


def test_what_the_paper_draws_is_measured_at_every_examination():
    server, records = Bowls("ab" * 6).run(3)

    (examined,) = (d for record in records for d in record.decisions if d.asks == "losses")
    split = {i: child for child in (1, 2) for i in server.tree[child].cached_updates}
    updates = {**server.tree[1].cached_updates, **server.tree[2].cached_updates}
    similarity = cosine_similarity(np.stack([updates[i] for i in sorted(updates)]))
    groups = [split[i] for i in sorted(updates)]
    across = np.not_equal.outer(groups, groups)
    assert examined.measurements["cross_similarity"] == pytest.approx(similarity[across].max())
    assert examined.measurements["separation_gap"] == pytest.approx(
        similarity[~across].min() - similarity[across].max()
    )


def test_without_half_updates_the_gap_and_held_out_losses_decide():
    bowls = Bowls("ab" * 8, apart=3.0, spread=1.0)
    bowls.can_halve = False
    server, records = bowls.run(8)
    assert bowls.found(server)
    assert any(
        "0 of 16 clients sent half updates" in d.reason for r in records for d in r.decisions
    )

    same = Bowls("a" * 16)
    same.can_halve = False
    server, _ = same.run(30)
    assert len(server.clusters) == 1


@pytest.mark.parametrize("seed", range(8))
def test_without_half_updates_few_alike_clients_are_not_split_by_chance(seed):
    bowls = Bowls("a" * 6, num_rows=10, seed=seed)
    bowls.can_halve = False

    server, _ = bowls.run(30)

    assert len(server.clusters) == 1


def test_clients_that_cannot_make_halves_are_routed_to_their_groups():
    bowls = Bowls("abcd" * 5)
    bowls.cannot_halve = {"c03", "c08"}

    server, _ = bowls.run(5)

    assert bowls.found(server)


def test_of_very_many_clients_some_are_compared_and_the_others_find_their_group(monkeypatch):
    monkeypatch.setattr("fedbranch.rules.group_search.MOST_COMPARED", 12)
    bowls = Bowls([0, 1, 2] * 12)

    server, records = bowls.run(8)

    decisions = [decision for record in records for decision in record.decisions]
    split = next(decision for decision in decisions if decision.verdict == "split")
    assert {d.measurements.get("num_halved") for d in decisions} == {12, None}
    assert sum(map(len, split.groups)) == 12
    found = {frozenset(bowls.group_of[i] for i in ids) for ids in server.clusters.values()}
    assert sorted(map(sorted, found)) == [[0], [1], [2]]
    assert sum(map(len, server.clusters.values())) == 36


def test_groups_that_alternate_are_seen_when_some_clients_are_compared(monkeypatch):
    # Every second client would be of one group only.
    monkeypatch.setattr("fedbranch.rules.group_search.MOST_COMPARED", 20)
    bowls = Bowls([*[0, 1] * 19, 0])

    server, _ = bowls.run(8)

    found = {frozenset(bowls.group_of[i] for i in ids) for ids in server.clusters.values()}
    assert sorted(map(sorted, found)) == [[0], [1]]
