"""Counts of releases: kept, resumed, and checked for damage."""

import os
from pathlib import Path

import pytest

import fedbranch as fb
from fedbranch.privacy import Privacy
from fedbranch.sim.release_counts import Releases
from fedbranch.storage.sealed_json import seal
from sim.hidden_runs import NOISE, SECRET, simulate
from sim.two_groups import Interrupted, interrupt_after


def test_lost_counts_are_not_taken_for_zero(tmp_path):
    privacy = Privacy(SECRET, noise=NOISE)
    with pytest.raises(Interrupted):
        simulate(privacy, folder=tmp_path, checkpoint_every=1, on_round=interrupt_after(2))
    (tmp_path / "releases.jsonl").unlink()

    with pytest.raises(fb.DamagedFile, match=r"releases.jsonl.*it has 0 of 2 rounds"):
        simulate(privacy, folder=tmp_path, checkpoint_every=1, resume=True)


@pytest.mark.parametrize("count", [-5, 0, 1.5, True, "2", None])
def test_counts_that_cannot_be_are_damage(tmp_path, count):
    privacy = Privacy(SECRET, noise=NOISE)
    with pytest.raises(Interrupted):
        simulate(privacy, folder=tmp_path, checkpoint_every=1, on_round=interrupt_after(1))
    line = seal({"round": 1, "releases": {"client-0": count}})
    (tmp_path / "releases.jsonl").write_bytes(line)

    with pytest.raises(fb.DamagedFile) as caught:
        simulate(privacy, folder=tmp_path, checkpoint_every=1, resume=True)

    assert "releases.jsonl line 1 cannot be read" in str(caught.value)
    assert f"client 'client-0' has {count!r} releases" in str(caught.value)


@pytest.fixture
def counts_path(tmp_path):
    """Write counts of three rounds; in the second round no client sent anything."""
    releases = Releases(tmp_path / "releases.jsonl")
    for counts in ({"a": 1, "b": 2}, {}, {"a": 1}):
        releases.add(counts)
    return tmp_path / "releases.jsonl"


@pytest.mark.parametrize(
    ("num_rounds", "sums"), [(0, {}), (2, {"a": 1, "b": 2}), (3, {"a": 2, "b": 2})]
)
def test_counts_continue_after_the_rounds_that_are_read(counts_path, num_rounds, sums):
    releases = Releases(counts_path)

    releases.go_on_after(num_rounds)
    assert releases.by_client == sums
    releases.add({"c": 1})

    again = Releases(counts_path)
    again.go_on_after(num_rounds + 1)
    assert again.by_client == {**sums, "c": 1}


def test_a_flipped_bit_of_the_counts_is_noticed_and_its_line_named(counts_path):
    whole = counts_path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        counts_path.write_bytes(changed)

        with pytest.raises(fb.DamagedFile) as caught:
            Releases(counts_path).go_on_after(3)

        lost_line_end = whole[position : position + 1] == b"\n"
        number = whole[:position].count(b"\n") + 1
        where = "is too short" if lost_line_end and number == 3 else f"line {number} cannot be read"
        assert str(caught.value).startswith(f"{counts_path} {where}")


def test_lines_of_counts_that_changed_places_are_damage(counts_path):
    lines = counts_path.read_bytes().splitlines(keepends=True)
    counts_path.write_bytes(lines[0] + lines[2] + lines[1])

    with pytest.raises(fb.DamagedFile, match=r"line 2 cannot be read.*it is round 3"):
        Releases(counts_path).go_on_after(3)


def test_the_counts_are_on_the_disk_before_the_state_that_needs_them(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file):
        calls.append((os.fstat(file).st_ino, os.fstat(file).st_size))
        fsync(file)

    def noted_replace(source, target, **more):
        calls.append(Path(target).name)
        replace(source, target, **more)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)

    simulate(Privacy(SECRET, noise=NOISE), folder=tmp_path, rounds=1, checkpoint_every=1)

    counts = (tmp_path / "releases.jsonl").stat()
    assert counts.st_size > 0
    assert (counts.st_ino, counts.st_size) in calls[: calls.index("state.json")]
