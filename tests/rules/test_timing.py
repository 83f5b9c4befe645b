"""When examinations begin, and how long a cluster stands still for them."""

import numpy as np
import pytest

from fedbranch import Server
from rules.bowls import DIM, Bowls, verdicts


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
