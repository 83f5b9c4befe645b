"""Evidence made by hand, drawn at random, or sketched."""

from dataclasses import replace

import numpy as np

from fedbranch import (
    Evidence,
    weighted_mean,
)
from fedbranch.core.projection import Projection


def evidence(
    updates,
    *,
    weights=None,
    num_members=None,
    rounds_trained=10,
    rounds_held=0,
    rounds_since_hold=None,
):
    updates = np.array(updates, dtype=np.float32)
    weights = np.ones(len(updates)) if weights is None else np.array(weights, dtype=float)
    return Evidence(
        node_id=0,
        round=7,
        client_ids=tuple(f"c{i}" for i in range(len(updates))),
        updates=updates,
        weights=weights,
        mean_update=weighted_mean(updates, weights),
        num_members=len(updates) if num_members is None else num_members,
        rounds_trained=rounds_trained,
        rounds_held=rounds_held,
        rounds_since_hold=rounds_since_hold,
    )


def sketched(whole, *, seed=0, size=256, is_kept=True):
    """Return the evidence that a server with sketches would show."""
    projection = Projection(dim=whole.updates.shape[1], size=size, seed=seed)
    found = replace(
        whole,
        updates=projection.of(whole.updates),
        mean_update=projection.of(whole.mean_update[None, :])[0],
        projection=projection,
        whole=whole.updates if is_kept else None,
    )
    found.__dict__["lengths"] = whole.lengths
    found.__dict__["mean_length"] = whole.mean_length
    return found


def planted(seed, num_groups, noise, num_clients=40, dim=4000):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(num_groups, dim))
    centres -= centres.mean(axis=0)
    groups = np.arange(num_clients) % num_groups
    return evidence(centres[groups] + noise * rng.normal(size=(num_clients, dim)))
