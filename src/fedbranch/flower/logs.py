"""The log of a federation, while it runs and at its end."""

from __future__ import annotations

import logging

from flwr.app import MetricRecord

from fedbranch.flower.metrics import CLUSTER_METRIC
from fedbranch.flower.result import ClusteredResult
from fedbranch.server.records import RoundRecord

__all__ = ["log", "log_record", "log_result", "shown"]

log = logging.getLogger("flwr.fedbranch")  # below Flower's own logger, so to the same place


def shown(metrics: MetricRecord) -> str:
    """Return the metrics that are single numbers as one line."""
    leaves = {name.split("/")[0] for name in metrics if CLUSTER_METRIC.match(name)}
    return ", ".join(
        f"{name} {value:.4g}"
        for name, value in metrics.items()
        if not isinstance(value, list)
        and (len(leaves) > 1 or not CLUSTER_METRIC.match(name))  # one leaf is all there is
    )


def log_record(record: RoundRecord) -> None:
    """Log what happened in a round, with the reasons."""
    log.info("\ttrain: %d updates used, %d refused", len(record.metrics), len(record.refused))
    for client_id, reason in record.refused.items():
        if client_id in record.metrics:
            log.warning("\ta reply of %s is not used: %s", client_id, reason)
        else:
            log.warning("\t%s is left out: %s", client_id, reason)
    for move in record.routed:
        log.info("\t%s goes from node %d to %d", move.client_id, move.from_node, move.to_node)
    for decision in record.decisions:
        norms = {
            word: decision.measurements[name]
            for word, name in [("mean", "mean_norm"), ("longest", "max_norm")]
            if name in decision.measurements
        }
        measured = ", ".join(f"{word} {norm:.3g}" for word, norm in norms.items())
        said = f"{measured}; {decision.reason}" if measured else decision.reason
        log.info("\tnode %d: %s: %s", decision.node_id, decision.verdict, said)


def log_result(result: ClusteredResult) -> None:
    """Log the clusters, and what a user of FedAvg would not expect."""
    for line in result.lines():
        log.info("\t%s", line)
    if not any(entry.record.metrics for entry in result.history):
        reasons = {r for entry in result.history[-1:] for r in entry.record.refused.values()}
        log.error(
            "\tNo client's update was ever used: the model is the initial one. %s",
            " / ".join(sorted(reasons)[:3]),
        )
    elif len(result.clusters) > 1:
        log.warning(
            "\tresult.arrays is the model at the root, as it was before the first split. A "
            "client's own is result.arrays_of(client_id), a cluster's result.arrays_at(leaf)"
        )
    else:
        decisions = [d for entry in result.history[-1:] for d in entry.record.decisions]
        log.info("\tNothing was split: %s", "; ".join(d.reason for d in decisions))
