"""Cut, changed, missing and swapped files, and full disks, never lead to wrong data."""

import errno
import os
import random
import shutil
import warnings

import pytest

from fakes import fingerprint
from fedbranch import Server
from fedbranch.errors import CannotWrite, FedbranchError, UsingPreviousState
from fedbranch.runs import Round, RunFolder
from fedbranch.storage.checkpoint import read_generation
from tests.reliability.small_run import digest, play


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("damage") / "whole"
    play(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the finished run, to be damaged."""
    return shutil.copytree(whole, tmp_path / "run")


READERS = {
    "about": lambda folder: RunFolder(folder).about,
    "summary": lambda folder: RunFolder(folder).summary,
    "history": lambda folder: [entry.to_json() for entry in RunFolder(folder).history()],
    "tree": lambda folder: RunFolder(folder).tree().client_ids,
    "server": lambda folder: fingerprint(Server.load(folder / "state")),
}


def previous_of(folder):
    """Return what the readers of a state find if only the state before it is whole."""
    server = Server.from_state(*read_generation(folder / "state", "server", "previous"))
    return {"tree": server.tree.client_ids, "server": fingerprint(server)}


def read_all(folder):
    return {name: read(folder) for name, read in READERS.items()}


def result_or_message(call, *args, **kwargs):
    """Return a call's result and None, or None and the message of an error of ours."""
    try:
        return call(*args, **kwargs), None
    except FedbranchError as error:
        return None, str(error)


def judge(folder, files, right, previous):
    """Return the outcomes of all readers after damage to some files.

    Fails on wrong data, on foreign errors, and on errors that name none of the files.
    """
    outcomes = set()
    for name, read in READERS.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found, message = result_or_message(read, folder)
        if message is not None:
            assert any(file in message for file in files), f"{message!r} does not name {files}"
            outcomes.add("named error")
            continue
        if not warned:
            assert found == right[name], f"{name} is wrong, with {files} damaged"
            continue
        (warning,) = warned
        assert warning.category is UsingPreviousState
        assert any(file in str(warning.message) for file in files)
        assert found == previous[name], f"{name} is not the previous one, with {files} damaged"
        outcomes.add("fallback")
    return outcomes or {"right data"}


def files_of(folder):
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]


def spread(size, number):
    """Return ``number`` places of a file, its first and last among them."""
    return sorted({round(i * (size - 1) / (number - 1)) for i in range(number)})


def damage_every_file(folder, num_lengths, num_flips):
    """Damage each file in each way; return the number of cases and counts of outcomes."""
    right, previous = read_all(folder), previous_of(folder)
    rng = random.Random(0)
    counts = {}

    def tried(files):
        for outcome in judge(folder, files, right, previous):
            counts[outcome] = counts.get(outcome, 0) + 1

    num_tried = 0
    for path in files_of(folder):
        content = path.read_bytes()
        for length in spread(len(content), num_lengths):
            path.write_bytes(content[:length])
            tried([named(path)])
            num_tried += 1
        for place in spread(len(content), num_flips):
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            tried([named(path)])
            num_tried += 1
        path.unlink()
        tried([named(path)])
        num_tried += 1
        path.write_bytes(content)
    for first in files_of(folder):
        for second in files_of(folder):
            if first < second:
                contents = first.read_bytes(), second.read_bytes()
                first.write_bytes(contents[1])
                second.write_bytes(contents[0])
                tried([named(first), named(second)])
                num_tried += 1
                first.write_bytes(contents[0])
                second.write_bytes(contents[1])
    assert read_all(folder) == right
    return num_tried, counts


def named(path):
    # Without summary.json a run is not complete, without run.json there is none.
    if path.name == "summary.json":
        return "complete" if not path.exists() else path.name
    return path.name


def test_damage_is_named_or_the_state_before_is_used(folder):
    _, counts = damage_every_file(folder, num_lengths=5, num_flips=8)

    assert counts["fallback"] > 0
    assert counts["named error"] > 0


@pytest.mark.reliability
def test_much_damage_never_gives_wrong_data(folder, measured):
    num_files = len(files_of(folder))

    num_tried, counts = damage_every_file(folder, num_lengths=64, num_flips=200)

    measured(
        "damage",
        f"{num_tried:,} cases over {num_files} files: wrong data in 0; a named error, the state "
        f"before, or the right data in all ({counts['named error']:,}, {counts['fallback']:,}, "
        f"{counts.get('right data', 0):,})",
    )
    assert counts["fallback"] > 0


def flip(path, place=-20):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def test_a_run_whose_files_are_damaged_ends_with_the_same_bytes_or_a_named_error(whole, tmp_path):
    right, outcomes = read_all(whole), {}
    for path in files_of(whole):
        folder = shutil.copytree(whole, tmp_path / path.name)
        damaged = folder / path.relative_to(whole)
        flip(damaged)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UsingPreviousState)
            _, message = result_or_message(play, folder, resume=True)
        if message is not None:
            assert path.name in message
            outcomes[path.name] = "error"
            continue
        # A file that is not needed stays damaged: the state before this one, if this one is whole.
        outcomes[path.name] = "fallback" if warned else "unneeded"
        if not warned:
            damaged.write_bytes(path.read_bytes())
        assert digest(folder) == digest(whole), path.name
        assert read_all(folder) == right

    assert outcomes["state.json"] == "fallback"
    assert outcomes["previous.json"] == "unneeded"
    assert outcomes["history.jsonl"] == "fallback"  # its last line is what was damaged
    assert outcomes["run.json"] == "error"
    assert sorted(outcomes.values()).count("fallback") == 3  # and the leaves


# A full disk


class FullDisk:
    """An operating system that fails at its n-th call that writes."""

    def __init__(self, monkeypatch, fails_at, reason=errno.ENOSPC):
        self.num_calls = 0
        self.fails_at = fails_at
        self.reason = reason
        self.has_failed = False
        for name in ("open", "write", "fsync", "replace"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, call):
        def counting(*args, **kwargs):
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                self.has_failed = True
                if call.__name__ == "write":  # some of it may still fit
                    call(args[0], args[1][: len(args[1]) // 2])
                raise OSError(self.reason, os.strerror(self.reason))
            return call(*args, **kwargs)

        return counting


def play_one_more_round(run, server):
    """Play one more round as a driver does, and save it."""
    server.plan(["c0"])
    run.append(Round(record=server.step({})))
    run.save_server(server)
    run.finish({"rounds": server.round})


def loaded_without_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Server.load(folder / "state")


def fail_at_every_call(whole, tmp_path, monkeypatch, reason):
    """Let each call of a save fail once; return the number of calls."""
    undisturbed = shutil.copytree(whole, tmp_path / f"undisturbed-{reason}")
    before = loaded_without_warning(undisturbed)
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, fails_at=None)
        play_one_more_round(RunFolder(undisturbed), loaded_without_warning(undisturbed))
    after = loaded_without_warning(undisturbed)
    assert after.round == before.round + 1

    for number in range(1, disk.num_calls + 1):
        folder = shutil.copytree(whole, tmp_path / f"{reason}-{number}")
        server = loaded_without_warning(folder)
        with monkeypatch.context() as patch:
            full = FullDisk(patch, fails_at=number, reason=reason)
            with pytest.raises(CannotWrite, match=r"cannot be written \([\d,]+ bytes\)") as caught:
                play_one_more_round(RunFolder(folder), server)
        assert full.has_failed
        assert caught.value.errno == reason
        assert str(caught.value.filename) in str(caught.value)
        assert str(caught.value.filename).startswith(str(folder))
        assert not list(folder.rglob("*.tmp"))

        # The old state, or all of the new one if only the very end went wrong.
        server = loaded_without_warning(folder)
        assert fingerprint(server) in (fingerprint(before), fingerprint(after))
        run = RunFolder(folder)
        run.truncate_history(server.round)
        if server.round == before.round:
            play_one_more_round(run, server)
        else:
            run.finish({"rounds": server.round})
        assert digest(folder) == digest(undisturbed)
    return disk.num_calls


def test_a_full_disk_costs_nothing_that_was_saved(whole, tmp_path, monkeypatch):
    assert fail_at_every_call(whole, tmp_path, monkeypatch, errno.ENOSPC) > 10


@pytest.mark.reliability
def test_a_disk_that_refuses_costs_nothing_that_was_saved(whole, tmp_path, monkeypatch, measured):
    reasons = (errno.ENOSPC, errno.EIO, errno.EDQUOT)

    counts = [fail_at_every_call(whole, tmp_path, monkeypatch, reason) for reason in reasons]

    measured(
        "disk-full",
        f"each of {counts[0]} calls failed with {len(reasons)} errors: what was saved loads, no "
        "temporary file, path and bytes in the message, and the run goes on to the same bytes",
    )
