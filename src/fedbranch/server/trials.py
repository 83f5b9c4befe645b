"""Models that clients measure their loss under: of a proposed split, and of one that is reviewed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedbranch.core.geometry import weighted_mean
from fedbranch.protocol.tasks import Trial, TrialRows
from fedbranch.server.averaging import aggregated, weights_of
from fedbranch.server.leaf import Leaf
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.reply import stacked
from fedbranch.tree import Node, ParameterTree, read_only
from fedbranch.types import Vector

__all__ = ["compared_models", "merged_model", "proposed_trials"]


def proposed_trials(node: Node, leaf: Leaf, options: ServerOptions) -> dict[str, tuple[Trial, ...]]:
    """Make what the clients of a proposal measure: a step together, and one of their group.

    If all of them sent half updates, steps are made from one half of the data of all clients and
    measured on the other half, both ways round; otherwise they are measured on held-out data. The
    latter also holds where signals are compared: the halves are then those of the signals, and
    no step goes along these.

    Returns
    -------
    dict
        Client id -> trials, in pairs.
    """
    store = leaf.store
    assert store is not None, "a proposal is made from replies"
    groups, halves = leaf.proposal, leaf.phase.halves
    proposed = [client_id for group in groups for client_id in group]
    replies = store.replies
    have_halves = halves is not None and all(
        replies[i].has_half and replies[i].rows.signal is None for i in proposed
    )

    def after_step(client_ids: Iterable[str], sign: int) -> tuple[Vector, Vector]:
        """Return the model after the updates of these clients, or of one half of their data."""
        ordered = [replies[client_id] for client_id in sorted(client_ids)]
        steps = stacked(ordered, "update")
        if sign:
            steps = steps + sign * stacked(ordered, "half")
        weights = weights_of(ordered, options, steps)
        buffers = node.buffers
        if buffers.size:
            of_buffers = stacked(ordered, "buffers")
            buffers = buffers + aggregated(of_buffers, weights, options, clips=False)
        return read_only(node.params + aggregated(steps, weights, options)), read_only(buffers)

    ways: list[tuple[int, TrialRows]] = [(0, "held-out")]
    if have_halves:  # v + h is the update from the first half
        ways = [(+1, "second half"), (-1, "first half")]
    measured_on = halves if have_halves else None
    together = [after_step(proposed, sign) for sign, _ in ways]
    trials: dict[str, tuple[Trial, ...]] = {}
    for group in groups:
        own: list[Trial] = []
        for (sign, rows), all_together in zip(ways, together, strict=True):
            for params, buffers in (all_together, after_step(group, sign)):
                own.append(Trial(params=params, buffers=buffers, on=rows, halves=measured_on))
        trials |= dict.fromkeys(group, tuple(own))
    return trials


def compared_models(tree: ParameterTree, node_id: int) -> tuple[Trial, ...]:
    """Return the mean of the leaves below a node, and then each leaf."""
    return (
        merged_model(tree, node_id),
        *(
            Trial(params=read_only(leaf.params), buffers=read_only(leaf.buffers))
            for leaf in tree.leaves_below(node_id)
        ),
    )


def merged_model(tree: ParameterTree, node_id: int) -> Trial:
    """Average all leaves below a node, each counted by its clients."""
    leaves = tree.leaves_below(node_id)
    counts = np.array([max(1, tree.num_members(leaf.id)) for leaf in leaves])
    params, buffers = (
        weighted_mean(vectors, counts) if vectors.size else vectors[0]
        for vectors in (
            np.stack([leaf.params for leaf in leaves]),
            np.stack([leaf.buffers for leaf in leaves]),
        )
    )
    return Trial(params=read_only(params), buffers=read_only(buffers))
