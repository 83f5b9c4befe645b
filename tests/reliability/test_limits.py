"""Clusters, weight and newcomers: the limits on what hostile clients can get of each."""

import numpy as np
import pytest

from fedbranch import AutoRule, Guard, ParameterTree, Server, Thresholds, Update
from fedbranch.server.guard import capped_weights

DIM = 500


def drawn(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.reliability
def test_a_split_bomb_ends_at_the_cap(measured):
    """60 of 100 clients send a direction of their own each, also in both halves."""
    largest = {}
    for name, rule in {
        "Thresholds": Thresholds(eps_mean=10.0, eps_max=1.0, gamma_max=0.3),
        "AutoRule": AutoRule(),
    }.items():
        for guard in (Guard(max_clusters=10), Guard(max_clusters=10, sets_strangers_aside=False)):
            rng = np.random.default_rng(0)
            own = drawn(rng, 60, DIM)
            pull = drawn(rng, 2, DIM)
            server = Server(DIM, rule=rule, guard=guard)
            ids = [f"client-{n:03}" for n in range(100)]
            largest.setdefault(name, 0)
            for _ in range(40):
                tasks = server.plan(ids)
                trials = server.trials(ids)
                replies = {}
                for n, client_id in enumerate(ids):
                    if client_id not in tasks:
                        continue
                    update = own[n] if n < 60 else pull[n % 2] + 0.3 * drawn(rng, DIM)
                    half = 0.01 * drawn(rng, DIM) if tasks[client_id].halves else None
                    replies[client_id] = Update(update, 10, half_difference=half)
                losses = {i: [1.0, 0.5] * (len(own) // 2) for i, own in trials.items()}
                server.step(replies, losses)
                largest[name] = max(largest[name], len(server.clusters))
    measured(
        "split-bomb",
        "cap of 10 clusters, 60 of 100 clients bomb: never more than "
        + ", ".join(f"{most} with {name}" for name, most in largest.items()),
    )
    assert max(largest.values()) <= 10
    assert largest["Thresholds"] == 10  # it was tried


@pytest.mark.reliability
def test_a_weight_lie_gets_the_cap_and_no_more(measured):
    rng = np.random.default_rng(0)
    shares, moved = [], []
    for claim in (1e3, 1e6, 1e9):
        for num_liars in (1, 2):
            counts = np.full(20, 100.0)
            counts[:num_liars] = claim
            capped = capped_weights(counts, 0.5)
            shares.append(float(capped.max() / capped.sum()))
        server = Server(DIM)
        ids = [f"client-{n:02}" for n in range(20)]
        common = drawn(rng, DIM)
        lie = -common
        server.plan(ids)
        server.step(
            {
                i: Update(lie if n == 0 else common, claim if n == 0 else 100)
                for n, i in enumerate(ids)
            }
        )
        moved.append(float(server.tree.root.params @ common / (common @ common)))
    measured(
        "weight-lie",
        f"largest share {max(shares):.3f}; the model never moves against the others "
        f"(at worst {min(moved):.2f} of their step)",
    )
    assert max(shares) <= 0.5 + 1e-9
    assert min(moved) > -1e-6


@pytest.mark.reliability
def test_newcomers_are_routed_right_past_a_poisoned_cache(measured):
    """A tenth of the updates on each edge is the other group's direction, without noise."""
    right = {0.0: 0, 0.1: 0}
    num_newcomers = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        pull = drawn(rng, 2, DIM)
        tree = ParameterTree(DIM)
        groups = []
        for group in range(2):
            cached = {f"{group}-{n}": pull[group] + drawn(rng, DIM) for n in range(30)}
            for n in range(3):
                cached[f"{group}-{n}"] = pull[1 - group].copy()
            groups.append(cached)
        tree.split(0, groups)
        for n in range(400):
            newcomer = pull[n % 2] + drawn(rng, DIM)
            num_newcomers += 1
            for share in right:
                child_id = tree.descend(0, newcomer, ignored_share=share).child_id
                right[share] += child_id == 1 + n % 2
    guarded, plain = right[0.1] / num_newcomers, right[0.0] / num_newcomers
    measured(
        "poisoned-cache",
        f"{guarded:.1%} of {num_newcomers} newcomers routed right "
        f"(by the paper's maximum: {plain:.1%})",
    )
    assert guarded >= 0.99
    assert plain < 0.5
