"""Records without `children`, `vanished` and `moved`, completed by the rules of the server."""

import copy
import json

import pytest

import fedbranch as fb
from fedbranch.report.facts.growth import Growth, grow
from fedbranch.runs import Round
from fedbranch.server.older_records import OlderRecords
from report.restless_run import RestlessRun

NEW = ("children", "vanished", "moved")


def lines_of(history):
    return [json.loads(json.dumps(entry.to_json())) for entry in history]


def without_new(line):
    return {name: value for name, value in line.items() if name not in NEW}


def completed(older, lines):
    return [Round.from_json(older.complete(line)) for line in lines]


def followed(history):
    """The nodes and positions after every round."""
    return [
        (copy.deepcopy(growth.nodes), dict(growth.positions))
        for _, growth in grow(history, Growth())
    ]


def played(seed, **kwargs):
    run = RestlessRun(seed, **kwargs)
    for _ in run.play(30):
        pass
    return run


@pytest.mark.parametrize("seed", range(10))
def test_what_older_records_do_not_name_follows_from_the_decisions(seed):
    run = played(seed)

    older = completed(OlderRecords(), map(without_new, lines_of(run.history)))

    assert followed(older) == followed(run.history)


@pytest.mark.parametrize("num_older", [0, 1, 13, 30])
def test_records_that_name_all_are_kept_and_followed(num_older):
    run = played(0)
    lines = lines_of(run.history)
    mixed = [*map(without_new, lines[:num_older]), *lines[num_older:]]

    history = completed(OlderRecords(), mixed)

    assert followed(history) == followed(run.history)
    assert history[num_older:] == run.history[num_older:]


def test_given_clusters_are_known_from_the_saved_tree():
    server = fb.Server(2, rule=fb.NeverSplit())
    leaves = server.partition({"x": [], "y": [], "z": []})
    server.join(["a", "b"], leaves["x"])
    server.join(["c"], leaves["y"])
    records = [server.step({})]
    server.join(["d"], leaves["z"])
    records.append(server.step({}))
    history = [Round(record=record) for record in records]

    older = OlderRecords(server.tree, saved_after=2)

    assert completed(older, map(without_new, lines_of(history))) == history


def test_moves_that_no_older_record_names_are_made_up_for_when_the_tree_was_saved():
    server = fb.Server(2, rule=fb.NeverSplit())
    leaves = server.partition({"x": ["a", "b"], "y": ["c"]})
    server.place({"a": leaves["y"]})
    history = [Round(record=server.step({}))]

    (first,) = completed(OlderRecords(server.tree, 1), map(without_new, lines_of(history)))

    assert first.record.children == {0: (1, 2)}
    positions = {i: server.tree.position(i) for i in "abc"}
    assert first.record.moved == positions
