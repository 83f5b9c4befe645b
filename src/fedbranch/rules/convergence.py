"""One model may have converged although its clients still pull apart.

That is the paper's meaning of a conflict, without thresholds: the updates have next to nothing in
common, and yet neither they nor the losses become smaller.
"""

from __future__ import annotations

import math

import numpy as np

from fedbranch.rules.draft import Draft

__all__ = ["doubt_about_conflict"]

ROUNDS_TO_CONVERGE = 30
LARGEST_COMMON_SHARE = 0.05  # of the updates' squared length, that their mean may explain
# Of norms and losses in the second third of the rounds, what at least is there in the last third.
LEAST_NORM_LEFT = 0.97
LEAST_LOSS_LEFT = 0.97


def doubt_about_conflict(draft: Draft) -> str:
    """Return why one model may still come to fit all clients; empty if nothing speaks for that."""
    measured, past = draft.measured, draft.evidence.past
    length = math.sqrt(sum(entry.norm**2 for entry in past[-1:]))
    in_common = (measured["mean_norm"] / length) ** 2 if length else 1.0
    measured["in_common"] = in_common
    if len(past) < ROUNDS_TO_CONVERGE:
        return (
            f"it has trained for {len(past)} rounds, and {ROUNDS_TO_CONVERGE} are needed to judge"
        )
    third = len(past) // 3
    before, after = past[-2 * third : -third], past[-third:]
    norm_left = sum(e.norm for e in after) / max(sum(e.norm for e in before), 1e-300)
    measured["norm_left"] = norm_left
    losses = [[e.loss for e in part if e.loss is not None] for part in (before, after)]
    if all(losses):
        measured["loss_left"] = float(np.mean(losses[1]) / max(float(np.mean(losses[0])), 1e-300))
    if in_common > LARGEST_COMMON_SHARE:
        return f"the updates still have {in_common:.0%} in common"
    if norm_left < LEAST_NORM_LEFT:
        return f"the updates still shrink (to {norm_left:.0%} over the last third of the rounds)"
    if measured.get("loss_left", 1.0) < LEAST_LOSS_LEFT:
        return f"the losses still fall (to {measured['loss_left']:.0%} over the last third of the rounds)"
    return ""
