"""Evidence and reviews of every kind that a server can show to a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.projection import Projection
from fedbranch.rules import Evidence, Groups, PastRound
from fedbranch.tree import ParameterTree

__all__ = ["made_evidence", "made_reviews"]

DIM = 40
SKETCH_SIZE = 16
NODE_ID, ROUND = 3, 12

Matrix = NDArray[np.float32]


def made_evidence() -> dict[str, Callable[[], Evidence]]:
    """Return functions that make evidence, by what it shows.

    The same function makes the same evidence at each call, in new arrays.
    """
    bases = dict(_plain())
    two = bases["two groups"]
    some = _shown(_in_groups(2, 4), num_members=13, num_new=3, rounds_held=2)
    return {
        **bases,
        "some clients have not answered": some,
        "no client was new": _with(some, num_new=0, rounds_held=30),
        "it is not known which clients were new": _with(some, num_new=None),
        **dict(_with_halves()),
        **dict(_with_proposals()),
        **dict(_with_sketches()),
        "examined before": _with(
            two, num_examined=7, rounds_since_examined=2, rounds_since_hold=2,
            rounds_held_for_it=3, last_measured={"p_structure": 0.04, "noise": 1.0},
        ),
        "merged before": _with(two, num_merged=3, rounds_since_examined=100, num_examined=60),
        "many past rounds": _with(
            two, rounds_trained=9,
            past=tuple(PastRound(2.0**-n, None if n % 2 else 1.0 / (n + 1)) for n in range(9)),
        ),
        "tensors of PyTorch": _as_tensors(two),
    }  # fmt: skip


def _plain() -> Iterator[tuple[str, Callable[[], Evidence]]]:
    """Make evidence without anything that was asked for."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(6, DIM)).astype(np.float32)
    one = noise[:1]
    mixed = noise.copy()
    mixed[1:4] = 0
    unequal = np.geomspace(1e-3, 1e6, 8)
    cases: list[tuple[str, Matrix, dict[str, Any]]] = [
        ("one client", one, {}),
        ("one client with an update of zeros", 0 * one, {}),
        ("two clients that agree", np.concatenate([one, one + 0.01 * noise[1:2]]), {}),
        ("two clients that oppose each other", np.concatenate([one, -one]), {}),
        ("identical updates", np.repeat(one, 6, axis=0), {}),
        ("updates of zeros", np.zeros((6, DIM), np.float32), {}),
        ("some updates of zeros", mixed, {}),
        ("no groups", noise, {}),
        ("two groups", _in_groups(2, 4), {}),
        ("five groups", _in_groups(5, 3), {}),
        ("two groups that oppose each other", np.concatenate([noise[:3], -noise[:3]]), {}),
        ("a group of one", _in_groups(2, 6)[:7], {}),
        ("sixty clients", _in_groups(3, 20), {}),
        ("very long updates", 1e17 * noise, {}),
        ("very short updates", 1e-17 * noise, {}),
        ("very unequal weights", _in_groups(2, 4), {"weights": unequal}),
        ("the first round", _in_groups(2, 4), {"rounds_trained": 0, "past": ()}),
        ("a model with one parameter", noise[:, :1], {}),
    ]
    for name, updates, more in cases:
        yield name, _shown(updates.astype(np.float32), **more)


def _with_halves() -> Iterator[tuple[str, Callable[[], Evidence]]]:
    rng = np.random.default_rng(1)
    updates = _in_groups(2, 5)
    num_clients = len(updates)
    differences = (0.3 * rng.normal(size=updates.shape)).astype(np.float32)
    everyone = tuple(range(num_clients))
    zeros = differences.copy()
    zeros[::2] = 0
    for name, rows, halves in [
        ("half updates of all clients", everyone, differences),
        ("half updates without any difference", everyone, 0 * differences),
        ("half updates, some without a difference", everyone, zeros),
        ("half updates of some clients", everyone[1:5], differences[1:5]),
        ("half updates of one client", everyone[:1], differences[:1]),
        ("half updates that no client could send", (), None),
    ]:
        for held, members in [(0, num_clients), (1, num_clients + 4), (25, num_clients)]:
            yield (
                f"{name}, after {held} rounds of a hold, of {members} clients",
                _shown(
                    updates,
                    num_members=members,
                    asked_for_halves=True,
                    halved_rows=rows,
                    half_differences=halves,
                    rounds_held=held,
                    num_new=0 if held else num_clients,
                ),
            )
    same = np.repeat(updates[:1], 4, axis=0)
    yield (
        "half updates of clients with identical updates",
        _shown(
            same,
            asked_for_halves=True,
            halved_rows=(0, 1, 2, 3),
            half_differences=np.repeat(differences[:1], 4, axis=0),
        ),
    )


def _with_proposals() -> Iterator[tuple[str, Callable[[], Evidence]]]:
    updates = _in_groups(2, 5)
    ids = _ids(len(updates))
    proposal: Groups = (ids[:5], ids[5:])
    better = dict.fromkeys(ids, (1.0, 0.5, 1.1, 0.4))
    held_out = {i: (1.0, 0.9 - 0.01 * n) for n, i in enumerate(ids)}
    for name, groups, losses in [
        ("losses that are better", proposal, better),
        ("losses on held-out examples", proposal, held_out),
        ("losses that are worse", proposal, dict.fromkeys(ids, (0.5, 1.0))),
        ("losses that are equal", proposal, dict.fromkeys(ids, (1.0, 1.0))),
        ("losses that are not finite", proposal, dict.fromkeys(ids, (np.inf, np.nan))),
        ("losses of some clients", proposal, {i: better[i] for i in ids[3:6]}),
        ("losses of one client", proposal, {ids[0]: better[ids[0]]}),
        ("no losses", proposal, {}),
        ("losses after clients have left", (ids[:1], ids[6:]), {i: better[i] for i in ids[6:]}),
    ]:
        for num_rounds in (1, 30):
            yield (
                f"{name}, {num_rounds} rounds after the proposal",
                _shown(
                    updates,
                    proposal=groups,
                    losses=losses,
                    rounds_proposed=num_rounds,
                    rounds_held=num_rounds,
                    num_new=0,
                    asked_for_halves=True,
                    halved_rows=tuple(range(len(updates))),
                    half_differences=0.1 * updates[::-1].copy(),
                ),
            )


def _with_sketches() -> Iterator[tuple[str, Callable[[], Evidence]]]:
    """Make evidence from sketches: with the updates kept beside them, and without."""
    whole = _in_groups(2, 5)
    projection = Projection(dim=DIM, size=SKETCH_SIZE)
    updates = np.asarray(projection.of(whole))
    halves = np.asarray(projection.of(0.1 * whole[::-1].copy()))
    rows = tuple(range(len(whole)))
    cases: dict[str, dict[str, Any]] = {
        "sketches of kept updates": {"whole": whole},
        "sketches of updates that were added up": {"can_measure": False},
    }
    for name, more in cases.items():
        yield name, _shown(updates, projection=projection, **more)
        if "whole" in more:
            more = {**more, "whole_half_differences": 0.1 * whole[::-1].copy()}
        yield (
            f"{name}, with half updates",
            _shown(
                updates,
                projection=projection,
                asked_for_halves=True,
                halved_rows=rows,
                half_differences=halves,
                **more,
            ),
        )


def _in_groups(num_groups: int, num_clients: int) -> Matrix:
    """Draw updates that point in one direction for each group, shape (clients, DIM)."""
    rng = np.random.default_rng(num_groups)
    pulls = np.repeat(rng.normal(size=(num_groups, DIM)), num_clients, axis=0)
    return (pulls + 0.3 * rng.normal(size=pulls.shape)).astype(np.float32)


def _ids(num_clients: int) -> tuple[str, ...]:
    return tuple(f"client-{n:02}" for n in range(num_clients))


def _shown(updates: Matrix, **more: Any) -> Callable[[], Evidence]:
    """Return a function that shows these updates to a rule."""

    def make() -> Evidence:
        num_clients = len(updates)
        given = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in more.items()
        }
        weights = given.pop("weights", np.arange(1.0, num_clients + 1)).astype(np.float32)
        mean = (weights / weights.sum()) @ updates
        settings: dict[str, Any] = {
            "num_members": num_clients,
            "rounds_trained": 5,
            "rounds_held": 0,
            "rounds_since_hold": None,
            "num_new": num_clients,
            "past": (PastRound(2.0, 1.0), PastRound(1.0, 0.5)),
        }
        return Evidence(
            node_id=NODE_ID,
            round=ROUND,
            client_ids=_ids(num_clients),
            updates=updates.copy(),
            weights=weights,
            mean_update=mean.astype(np.float32),
            **{**settings, **given},
        )

    return make


def _with(make: Callable[[], Evidence], **changes: Any) -> Callable[[], Evidence]:
    return lambda: replace(make(), **changes)


def _as_tensors(make: Callable[[], Evidence]) -> Callable[[], Evidence]:
    """Show evidence in tensors, as replies on a GPU are shown."""

    def make_tensors() -> Evidence:
        import torch  # here: rules themselves need no PyTorch

        evidence = make()
        tensors: dict[str, Any] = {
            name: torch.from_numpy(getattr(evidence, name))
            for name in ("updates", "weights", "mean_update")
        }
        return replace(evidence, **tensors)

    return make_tensors


def made_reviews() -> dict[str, tuple[ParameterTree, Mapping[str, tuple[float, ...]]]]:
    """Make trees with a split of node 0 that is to be reviewed, and clients' losses.

    Returns
    -------
    dict
        What is shown -> the tree, and client id -> its losses under the mean of the leaves and
        under each leaf.
    """
    found: dict[str, tuple[ParameterTree, Mapping[str, tuple[float, ...]]]] = {}
    for num_groups in (2, 3):
        own = {i: n // 4 for n, i in enumerate(_ids(4 * num_groups))}

        def losses(better: float, at_others: float, own: dict[str, int] = own) -> dict[str, Any]:
            leaves = range(max(own.values()) + 1)
            return {
                i: (1.0, *(better if leaf == group else at_others for leaf in leaves))
                for i, group in own.items()
            }

        all_better = losses(0.5, 2.0)
        first = next(iter(own))
        for name, measured in [
            ("the split pays", all_better),
            ("the split does not pay", losses(1.5, 2.0)),
            ("all models are equal", losses(1.0, 1.0)),
            ("other leaves are better", losses(0.9, 0.3)),
            ("losses that are not finite", losses(np.inf, np.nan)),
            ("losses of one client", {first: all_better[first]}),
            ("no losses", {}),
        ]:
            found[f"{num_groups} groups: {name}"] = (_split_tree(num_groups), measured)
    return found


def _split_tree(num_groups: int) -> ParameterTree:
    updates = _in_groups(num_groups, 4)
    ids = _ids(len(updates))
    tree = ParameterTree(DIM)
    for client_id in ids:
        tree.place(client_id, 0)
    groups = [
        {ids[row]: updates[row] for row in range(4 * group, 4 * group + 4)}
        for group in range(num_groups)
    ]
    tree.split(0, groups, in_round=ROUND - 2)
    return tree
