"""Runs in which clients send sketches to be compared."""

import pytest

from fedbranch.privacy import Privacy
from fedbranch.storage.checkpoint import read_checkpoint
from sim.hidden_runs import NEWCOMER, RULES, SECRET, decisions, moves, plain_run, simulate


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("rule", RULES)
def test_clusters_are_found_from_sketches(rule, engine):
    plain = plain_run("smooth", rule, engine)

    sketched = simulate(Privacy(SECRET, sketch=128), rule=rule, engine=engine)

    assert sorted(sketched.clusters.values()) == sorted(plain.clusters.values())
    assert NEWCOMER in {move[1] for move in moves(sketched)}
    assert sketched.server.compare == "signal"
    assert sketched.server.num_signal == 128


def test_norms_of_sketches_are_those_of_updates_but_for_chance():
    plain = plain_run("smooth", "thresholds", "reference")
    sketched = simulate(Privacy(SECRET, sketch=256), engine="reference", rounds=8)

    for ours, theirs in zip(sketched.history, plain.history, strict=False):
        for name, value in theirs.record.decisions[0].measurements.items():
            if "norm" in name:
                assert ours.record.decisions[0].measurements[name] == pytest.approx(value, rel=0.25)


@pytest.mark.parametrize("rule", RULES)
def test_whole_updates_are_kept_only_while_a_cluster_waits(tmp_path, rule):
    lengths = {}  # kind of file -> round -> lengths of the vectors that it keeps

    def keep(entry):
        _, files = read_checkpoint(tmp_path / "state", "server")
        for name, tensors in files.items():
            kept = {tensor.shape[1] for tensor in tensors.values() if tensor.ndim == 2}
            if kept:
                lengths.setdefault(name.split("-")[0], {})[entry.record.round] = kept

    run = simulate(
        Privacy(SECRET, sketch=64), rule=rule, folder=tmp_path, checkpoint_every=1, on_round=keep
    )

    held = {number for number, _, verdict, *_ in decisions(run) if verdict == "hold"}
    assert len(run.clusters) == 2
    assert run.tree.num_params > 64
    assert set().union(*lengths["edge"].values()) == {64}
    assert set(lengths.get("held", {})) == held
    assert bool(held) == (rule == "auto")
