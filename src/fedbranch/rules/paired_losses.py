"""Losses of the same client under two models, compared over many clients by a paired test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from scipy.stats import wilcoxon

__all__ = ["gain", "mean_gains", "p_value", "pairs"]

LARGEST_LOSS = 1e6  # losses beyond it, and those that are not finite, count as this one


def gain(together: float, apart: float) -> float:
    """Compute by how much a loss is lower apart; a model that has diverged has the largest loss."""
    first, second = (
        min(max(loss, -LARGEST_LOSS), LARGEST_LOSS) if math.isfinite(loss) else LARGEST_LOSS
        for loss in (together, apart)
    )
    return first - second


def pairs(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Split a client's losses into pairs: after a step together, after one of its group."""
    return list(zip(losses[::2], losses[1::2], strict=True))


def mean_gains(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compute each client's mean gain over its pairs of losses."""
    return {i: float(np.mean([gain(*pair) for pair in pairs(own)])) for i, own in losses.items()}


def p_value(gains: Sequence[float], alternative: Literal["greater", "less"]) -> float:
    """Test by Wilcoxon's signed ranks whether gains are above ("greater") or below zero."""
    if not any(gains):
        return 1.0
    return float(wilcoxon(gains, alternative=alternative).pvalue)
