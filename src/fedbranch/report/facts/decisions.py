"""The examinations of a run as the page shows them."""

from __future__ import annotations

from fedbranch.report.facts.examinations import VERDICTS, episodes, measured_in_words
from fedbranch.report.facts.run import RunFacts
from fedbranch.rules import Decision
from fedbranch.types import JSON

__all__ = ["decisions"]

MOST_DECISIONS = 2000
LONGEST_REASON = 300  # characters


def decisions(run: RunFacts) -> list[JSON]:
    """Return the episodes of examinations. Of too many, splits, merges and the last ones stay."""
    found = list(episodes(run.examinations))
    if len(found) > MOST_DECISIONS:
        ranks = {id(e): (e.last.verdict in ("split", "merge"), e.last.round) for e in found}
        kept = sorted(found, key=lambda e: ranks[id(e)], reverse=True)[:MOST_DECISIONS]
        kept_ids = {id(episode) for episode in kept}
        found = [episode for episode in found if id(episode) in kept_ids]
    return [_decision(run, e.decisions[0].round, e.last) for e in found]


def _decision(run: RunFacts, first_round: int, decision: Decision) -> JSON:
    children = run.growth.children_of.get((decision.round, decision.node_id), ())
    return {
        "node": decision.node_id,
        "first_round": first_round,
        "round": decision.round,
        "verdict": decision.verdict,
        "title": VERDICTS[decision.verdict],
        "reason": decision.reason[:LONGEST_REASON],
        "measured": measured_in_words(decision),
        "children": list(children) if decision.verdict == "split" else [],
        "moves": [
            [run.index_of[i], leaf_id]
            for i, leaf_id in sorted(decision.moves.items())
            if i in run.index_of
        ],
    }
