"""Under only_conflicts a cluster is split only after one model has converged."""

from dataclasses import replace

import numpy as np

from fedbranch import AutoRule, Evidence, weighted_mean
from fedbranch.rules import PastRound
from rules.bowls import DIM, Bowls


def test_only_conflicts_waits_until_one_model_has_converged():
    early, _ = Bowls("ab" * 8).run(20, rule=AutoRule(only_conflicts=True))
    assert len(early.clusters) == 1

    bowls = Bowls("ab" * 8)
    late, records = bowls.run(80, rule=AutoRule(only_conflicts=True))
    assert bowls.found(late)
    assert any("perhaps no conflict" in d.reason for r in records for d in r.decisions)


def test_only_conflicts_does_not_split_what_converges_to_one_model():
    """The groups' updates differ, but shrink: the groups have the same optimum in the end."""
    rule = AutoRule(only_conflicts=True)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=DIM) for _ in range(2))
    noise = 0.05 * rng.normal(size=(12, DIM))
    updates = np.float32(np.stack([a - b] * 6 + [b - a] * 6) + noise)
    halves = np.float32(0.05 * rng.normal(size=(12, DIM)))
    evidence = Evidence(
        node_id=0,
        round=60,
        client_ids=tuple(f"c{i:02}" for i in range(12)),
        updates=updates,
        weights=np.ones(12),
        mean_update=weighted_mean(updates, np.ones(12)),
        num_members=12,
        rounds_trained=60,
        rounds_held=0,
        rounds_since_hold=None,
        asked_for_halves=True,
        halved_rows=tuple(range(12)),
        half_differences=halves,
    )
    length = float(np.linalg.norm(updates, axis=1).mean())

    def decided(norms, losses):
        past = [PastRound(n, loss) for n, loss in zip(norms, losses, strict=True)]
        return rule.examine(replace(evidence, past=past)).verdict

    flat, falling = [length] * 60, [length * 0.97**i for i in range(60, 0, -1)][::-1]
    assert decided(flat, [1.0] * 60) == "hold"
    assert decided(falling, [1.0] * 60) == "train"
    assert decided(flat, [0.97**i for i in range(60)]) == "train"
    assert decided(flat, [None] * 60) == "hold"
    assert decided(flat[:20], [1.0] * 20) == "train"
