"""Files of a population that contradict each other are refused; others can be worked with."""

import numpy as np
import pytest

from fedbranch import DamagedFile, Server
from fedbranch.storage.checkpoint import read_checkpoint, write_checkpoint
from population.crowds import crowd, ids_of, make_small, play


def saved(monkeypatch, tmp_path):
    """Save a server that has every kind of file, and read its state and files."""
    make_small(monkeypatch)
    server = crowd(30)
    for number in range(4):
        play(server, ids_of(30)[number::7], number)
    server.mark_present(["client-0000005"])
    server.join(["x", "y"])
    server.tree.place("client-0000003", 0)
    server.tree.split(0, [{"client-0000003": np.float32([1, 0, 0])}, {"x": np.float32([0, 1, 0])}])
    server.save(tmp_path)
    return read_checkpoint(tmp_path, "server")


ARRAYS = {
    "clients-0": ["packed", "ends", "digests", "order"],
    "positions": ["numbers"],
    "moves": ["packed", "ends", "rows", "numbers", "more"],
    "seen": ["numbers"],
    "sightings": ["rows", "numbers", "more"],
}


def test_all_files_of_a_population_are_there(monkeypatch, tmp_path):
    _, files = saved(monkeypatch, tmp_path)

    assert {name: set(files[name]) for name in ARRAYS} == {n: set(a) for n, a in ARRAYS.items()}


EDITS = {
    "longer": lambda array: np.concatenate([array, array[-1:]]),
    "shorter": lambda array: array[:-1],
    "empty": lambda array: array[:0],
    "of another type": lambda array: array.astype(np.float64),
    "of two dimensions": lambda array: array[None, :],
    "the largest number": lambda array: np.full_like(array, np.iinfo(array.dtype).max),
    "one number too large": lambda array: np.append(array[:-1], np.iinfo(array.dtype).max),
    "the first number too large": lambda array: np.append(np.iinfo(array.dtype).max, array[1:]),
    "the smallest number": lambda array: np.full_like(array, np.iinfo(array.dtype).min),
    "backwards": lambda array: array[::-1].copy(),
    "missing": lambda _: None,
}


# These edits make a state that could be one: ids with other letters, clients at other positions.
# Whether every digest is the right one is not checked, as that would take as long as finding all.
MAY_BE = {
    ("packed", "backwards"),
    ("packed", "the smallest number"),
    ("order", "backwards"),
    ("digests", "the largest number"),
    ("digests", "one number too large"),
    ("digests", "the smallest number"),
    ("numbers", "backwards"),
    ("numbers", "the smallest number"),
    ("more", "backwards"),
    ("more", "the smallest number"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("file", "name"), [(f, n) for f, names in ARRAYS.items() for n in names])
def test_arrays_that_contradict_each_other_are_refused(monkeypatch, tmp_path, file, name, edit):
    state, files = saved(monkeypatch, tmp_path)
    edited = dict(files[file])
    edited[name] = EDITS[edit](edited[name].copy())
    if edited[name] is None:
        del edited[name]
    write_checkpoint(tmp_path / "made", "server", state, {**files, file: edited})

    if (name, edit) not in MAY_BE and len(files[file][name]) > 1:
        with pytest.raises(DamagedFile, match="contradicts itself"):
            Server.load(tmp_path / "made")
        return
    try:
        server = Server.load(tmp_path / "made")
    except DamagedFile:
        return
    # If it is read, the server works.
    server.plan(ids_of(30)[::5])
    server.mark_present(ids_of(30)[::5])
    server.step({})
    server.save(tmp_path / "again")


@pytest.mark.parametrize("seed", range(60))
def test_arrays_that_were_changed_at_random_are_read_or_refused(monkeypatch, tmp_path, seed):
    state, files = saved(monkeypatch, tmp_path)
    rng = np.random.default_rng(seed)
    files = {name: dict(tensors) for name, tensors in files.items()}
    for _ in range(rng.integers(1, 3)):
        file = str(rng.choice(list(ARRAYS)))
        name = str(rng.choice(list(files[file])))
        array = files[file][name].copy()
        limits = np.iinfo(array.dtype)
        numbers = [0, 1, 2, limits.min, limits.max, int(array[0])]
        for place in rng.integers(0, len(array), size=2):
            array[place] = numbers[rng.integers(len(numbers))]
        files[file][name] = array
    write_checkpoint(tmp_path / "made", "server", state, files)

    try:
        server = Server.load(tmp_path / "made")
    except DamagedFile:
        return
    server.plan([*ids_of(30)[::3], "x", "z"])
    server.step({})
    server.tree.cluster(0)
    server.save(tmp_path / "again")
