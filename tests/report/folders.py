"""Run folders written by hand, so that every number in a report is known."""

from __future__ import annotations

import numpy as np

import fedbranch as fb
from fedbranch.runs import Round, RunFolder
from fedbranch.server.records import RoundRecord, Routing

EAST, WEST = np.float32([1, 0]), np.float32([-1, 0])


def about(client_ids="abcd", *, groups=None, rounds=4, seed=0, **other):
    return {
        "method": "cfl",
        "seed": seed,
        "rounds": rounds,
        "rule": {"name": "AutoRule", "settings": {"coverage": 0.5}},
        "clients": [{"id": i, "group": (groups or {}).get(i), "num_train": 10} for i in client_ids],
        **other,
    }


def decision(node_id, number, verdict="train", **more):
    measured = {"mean_norm": 0.1 * number, "max_norm": 1.0}
    return fb.Decision(
        **{
            "node_id": node_id,
            "round": number,
            "verdict": verdict,
            "reason": f"because of {number}",
            "measurements": measured,
            **more,
        }
    )


def played(number, sizes, accuracy=None, **record):
    """A round after which the clusters have these sizes and clients this accuracy."""
    evaluation = {i: {"loss": 1 - a, "accuracy": a} for i, a in (accuracy or {}).items()}
    return Round(
        record=RoundRecord(round=number, cluster_sizes=sizes, **record), evaluation=evaluation
    )


def split(node_id, number, **parts):
    """The parts of a record with a split: `_1="ab"` are the clients of the new leaf 1."""
    groups = {int(name[1:]): tuple(client_ids) for name, client_ids in parts.items()}
    return {
        "decisions": (decision(node_id, number, "split", groups=tuple(groups.values())),),
        "children": {node_id: tuple(groups)},
        "moved": {i: leaf_id for leaf_id, ids in groups.items() for i in ids},
    }


def pass_rounds(server, number):
    """Let a server do rounds without replies, so that it is saved as after them."""
    for _ in range(number):
        server.step({})


def split_run(path, **kwargs):
    """Four clients: a and b form a cluster, c and d another from round 2 on; d joins in round 3.

    The server was saved after round 2 and the history goes on to round 4.
    """
    groups = {"a": "x", "b": "x", "c": "y", "d": "y"}
    folder = RunFolder.create(path, about(**{"groups": groups, **kwargs}))
    server = fb.Server(2, rule=fb.NeverSplit())
    server.join(["a", "b", "c"])
    server.tree.split(0, [{"a": EAST, "b": EAST}, {"c": WEST}], in_round=2)
    pass_rounds(server, 2)
    rounds = [
        played(1, {0: 3}, {"a": 0.5, "b": 0.7, "c": 0.3}, joined=("a", "b", "c")),
        played(
            2,
            {1: 2, 2: 1},
            {"a": 0.6, "b": 0.8, "c": 0.4},
            refused={"b": "too long"},
            **split(0, 2, _1="ab", _2="c"),
        ),
        played(3, {1: 2, 2: 1}, {}, joined=("d",), decisions=(decision(1, 3), decision(2, 3))),
        played(
            4,
            {1: 2, 2: 2},
            {"a": 0.9, "b": 0.7, "c": 0.8, "d": 0.6},
            decisions=(decision(1, 4), decision(2, 4)),
            routed=(Routing(client_id="d", from_node=0, to_node=2, similarities={1: -1, 2: 1}),),
            moved={"d": 2},
        ),
    ]
    for entry in rounds[:2]:
        folder.append(entry)
    folder.save_server(server)
    for entry in rounds[2:]:
        folder.append(entry)
    return folder
