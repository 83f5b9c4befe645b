"""What the terminal shows of a run, as JSON for machines."""

from __future__ import annotations

from dataclasses import asdict

from fedbranch.report.facts.run import RunFacts
from fedbranch.types import JSON

__all__ = ["run_json"]


def run_json(run: RunFacts) -> JSON:
    """Return everything that :func:`fedbranch.report.text.terminal.print_run` prints."""
    clusters = {str(leaf_id): client_ids for leaf_id, client_ids in run.clusters.items()}
    return {
        "run": str(run.folder.path),
        "is_complete": run.is_complete,
        "rounds": len(run.history),
        "metric": run.main_metric,
        "clusters": clusters,
        "names": run.names,
        "true_groups": {leaf_id: dict(run.groups_at(int(leaf_id))) for leaf_id in clusters},
        "tree": [
            {
                "node_id": node.id,
                "parent_id": node.parent_id,
                "num_clients": len(run.clients_at[node.id]),
                "split_in_round": node.split_in_round,
            }
            for node in run.growth.nodes.values()
        ],
        "finds_true_groups": run.finds_true_groups,
        "splits": [asdict(split) for split in run.splits],
        "last_decisions": [asdict(decision) for decision in run.last_decisions],
        "refused": dict(run.refused),
        "mean": {
            method: {
                "overall": run.mean(method, run.known_client_ids),
                "clusters": {leaf_id: run.mean(method, ids) for leaf_id, ids in clusters.items()},
            }
            for method in run.final_by_method
        },
    }
