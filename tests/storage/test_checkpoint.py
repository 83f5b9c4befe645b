"""Checkpoints: whole after any crash, and damage is noticed."""

import json

import numpy as np
import pytest

from fedbranch import DamagedFile
from fedbranch.errors import UsingPreviousState
from fedbranch.storage.checkpoint import (
    LastingTensors,
    peek,
    read_checkpoint,
    read_generation,
    write_checkpoint,
)
from fedbranch.storage.sealed_json import seal, unseal


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, 1)
    return tmp_path


def write(folder, number):
    files = {
        "changing": {"x": np.full(3, number, dtype=np.float32)},
        "fixed": {"y": np.arange(4.0)},
        "empty": {},
    }
    write_checkpoint(folder, "test", {"number": number}, files)


def test_what_is_read_is_what_was_written(folder):
    state, files = read_checkpoint(folder, "test")

    assert state == {"number": 1}
    assert files["changing"]["x"].tolist() == [1, 1, 1]
    assert files["fixed"]["y"].tolist() == [0, 1, 2, 3]


def test_a_second_write_replaces_the_first_and_keeps_what_did_not_change(folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("fixed-*")}

    write(folder, 2)

    state, files = read_checkpoint(folder, "test")
    assert (state["number"], files["changing"]["x"][0]) == (2, 2)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("fixed-*")} == before
    # Of three states the last two are there, with what they share once.
    write(folder, 3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert len(list(folder.iterdir())) == 5


def test_a_crash_before_the_last_step_leaves_the_old_state(folder, monkeypatch):
    import fedbranch.storage.checkpoint as module

    original = module.replace_file

    def crash_at_the_state(path, content):
        if path.name == "state.json":
            raise KeyboardInterrupt
        original(path, content)

    monkeypatch.setattr(module, "replace_file", crash_at_the_state)
    with pytest.raises(KeyboardInterrupt):
        write(folder, 2)

    state, files = read_checkpoint(folder, "test")
    assert (state["number"], files["changing"]["x"][0]) == (1, 1)
    assert len(list(folder.glob("changing-*"))) == 1


def test_files_of_others_stay(folder):
    (folder / "my-model.safetensors").write_bytes(b"precious")

    write(folder, 2)

    assert (folder / "my-model.safetensors").read_bytes() == b"precious"


def test_writing_again_repairs_a_damaged_file(folder):
    flip_a_bit(folder)

    write(folder, 1)

    assert read_checkpoint(folder, "test")[1]["fixed"]["y"].tolist() == [0, 1, 2, 3]


def test_files_that_a_crash_has_left_are_removed(folder):
    (folder / f"changing-{'0' * 16}.safetensors").write_bytes(b"")
    (folder / f"node-3-{'0' * 16}.safetensors.tmp").write_bytes(b"")
    (folder / f"held-3-4-{'0' * 16}.safetensors").write_bytes(b"")
    (folder / "previous.json.tmp").write_bytes(b"")

    write(folder, 2)

    assert len(list(folder.iterdir())) == 5


def test_no_file_is_a_pickle(folder):
    for path in folder.iterdir():
        assert path.suffix in {".json", ".safetensors"}
    json.loads((folder / "state.json").read_text())


def truncate(folder):
    path = next(folder.glob("fixed-*"))
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder, name="fixed-*"):
    path = next(folder.glob(name))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def edit_state(folder, **changes):
    path = folder / "state.json"
    path.write_bytes(seal({**unseal(path.read_bytes()), **changes}))


def entry(file, sha256="0" * 64, num_bytes=8):
    return {"file": file, "sha256": sha256, "bytes": num_bytes}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"fixed-\w+\.safetensors was cut or changed: it has \d+ bytes"),
        (flip_a_bit, r"fixed-\w+\.safetensors was cut or changed: its SHA-256"),
        (lambda folder: next(folder.glob("fixed-*")).unlink(), "is missing"),
        (lambda folder: (folder / "state.json").unlink(), "does not exist"),
        (lambda folder: (folder / "state.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda folder: edit_state(folder, schema=99), "schema 99"),
        (lambda folder: edit_state(folder, kind="tree"), "holds a saved tree"),
        (lambda folder: edit_state(folder, state=None), "its state is no JSON object"),
        (lambda folder: edit_state(folder, generation="previous"), "saved as the previous one"),
        (
            lambda folder: edit_state(folder, tensors={"x": entry("../../etc/passwd")}),
            "not named by",
        ),
        (lambda folder: edit_state(folder, tensors={"x": entry("/etc/passwd")}), "not named by"),
        (lambda folder: edit_state(folder, tensors={"../x": entry("x")}), "is no name"),
        (
            lambda folder: edit_state(
                folder, tensors={"x": entry(f"x-{'0' * 16}.safetensors", num_bytes=-1)}
            ),
            "is to have -1 bytes",
        ),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder)

    with pytest.raises(DamagedFile, match=message):
        read_checkpoint(folder, "test")


def test_a_link_in_the_place_of_a_tensor_file_is_not_followed(folder, tmp_path_factory):
    file = next(folder.glob("fixed-*"))
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)

    with pytest.raises(DamagedFile, match="no plain file"):
        read_checkpoint(folder, "test")


def damage_current(folder):
    current = set(json.loads((folder / "state.json").read_text())["tensors"]["changing"].values())
    file = next(path for path in folder.glob("changing-*") if path.name in current)
    file.write_bytes(b"x" * file.stat().st_size)


def test_the_state_before_is_used_with_a_warning_if_the_last_one_is_damaged(folder):
    write(folder, 2)
    damage_current(folder)

    with pytest.warns(UsingPreviousState, match=r"changing-.*previous\.json is used") as warned:
        state, files = read_checkpoint(folder, "test")

    assert len(warned) == 1
    assert (state["number"], files["changing"]["x"][0]) == (1, 1)
    assert peek(folder, "test") == {"number": 2}  # without its tensors it can be read


def test_if_both_states_are_damaged_both_are_named(folder):
    write(folder, 2)
    damage_current(folder)
    (folder / "previous.json").write_text("{}")

    with pytest.raises(DamagedFile, match=r"changing-.*previous\.json"):
        read_checkpoint(folder, "test")


def test_states_that_were_swapped_are_not_taken_for_each_other(folder):
    write(folder, 2)
    current, previous = folder / "state.json", folder / "previous.json"
    contents = current.read_bytes(), previous.read_bytes()
    current.write_bytes(contents[1])
    previous.write_bytes(contents[0])

    with pytest.raises(DamagedFile, match=r"state\.json holds .* the previous one.*previous\.json"):
        read_checkpoint(folder, "test")


@pytest.mark.parametrize("damage", [damage_current, lambda f: (f / "state.json").write_text("{")])
def test_a_damaged_state_does_not_take_the_place_of_the_one_before(folder, damage):
    write(folder, 2)
    damage(folder)

    write(folder, 3)

    assert read_checkpoint(folder, "test")[0] == {"number": 3}
    assert read_generation(folder, "test", "previous")[0] == {"number": 1}


def test_a_state_that_is_saved_twice_is_not_its_own_predecessor(folder):
    write(folder, 2)
    write(folder, 2)

    assert read_generation(folder, "test", "previous")[0] == {"number": 1}


def test_nan_in_a_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_checkpoint(tmp_path, "test", {"x": float("nan")}, {})


def lasting(calls, value=1.0):
    def make():
        calls.append(value)
        return {"x": np.float32([value])}

    return LastingTensors(make)


def test_lasting_tensors_are_made_once_for_each_folder(tmp_path):
    calls = []
    edge = lasting(calls)

    for name in ("a", "a", "a"):
        write_checkpoint(tmp_path / name, "server", {}, {"edge-1": edge})
    num_for_one = len(calls)
    write_checkpoint(tmp_path / "b", "server", {}, {"edge-1": edge})
    write_checkpoint(tmp_path / "a", "server", {}, {"edge-1": edge})

    assert len(calls) == 2 * num_for_one
    for name in ("a", "b"):
        _, files = read_checkpoint(tmp_path / name, "server")
        assert files["edge-1"]["x"].tolist() == [1.0]


@pytest.mark.parametrize("content", [None, b"", b"cut"])
def test_lasting_tensors_are_written_again_if_their_file_is_missing_or_cut(tmp_path, content):
    edge = lasting([])
    write_checkpoint(tmp_path, "server", {}, {"edge-1": edge})
    (file,) = tmp_path.glob("edge-1-*")
    file.unlink()
    if content is not None:
        file.write_bytes(content)

    write_checkpoint(tmp_path, "server", {}, {"edge-1": edge})

    assert read_checkpoint(tmp_path, "server")[1]["edge-1"]["x"].tolist() == [1.0]


@pytest.fixture
def read_again(monkeypatch):
    """Record the names of the tensor files that are read to compare their SHA-256."""
    import fedbranch.storage.checkpoint as module

    names, original = [], module._check_digest

    def counting(file, entry):
        names.append(entry["file"].split("-")[0])
        original(file, entry)

    monkeypatch.setattr(module, "_check_digest", counting)
    return names


def test_the_file_of_lasting_tensors_is_checked_once_before_its_state_becomes_the_previous_one(
    tmp_path, read_again
):
    edge = lasting([])
    counts = []

    for number in range(5):
        write_checkpoint(tmp_path, "test", {"number": number}, {"edge-1": edge})
        counts.append(read_again.count("edge"))

    assert counts == [0, 1, 1, 1, 1]


def test_lasting_tensors_are_written_again_if_their_file_was_changed(tmp_path):
    first, second = lasting([], value=1.0), lasting([], value=2.0)
    write_checkpoint(tmp_path, "test", {"number": 0}, {"edge-1": first})
    write_checkpoint(tmp_path, "test", {"number": 1}, {"edge-1": first, "edge-2": second})
    flip_a_bit(tmp_path, "edge-2-*")

    write_checkpoint(tmp_path, "test", {"number": 2}, {"edge-1": first, "edge-2": second})

    for generation, number in (("current", 2), ("previous", 1)):
        state, files = read_generation(tmp_path, "test", generation)
        assert state == {"number": number}
        assert files["edge-2"]["x"].tolist() == [2.0]


def test_a_state_whose_lasting_file_was_changed_does_not_replace_the_one_before(tmp_path):
    gone = lasting([])
    write_checkpoint(tmp_path, "test", {"number": 0}, {})
    write_checkpoint(tmp_path, "test", {"number": 1}, {"edge-1": gone})
    flip_a_bit(tmp_path, "edge-1-*")

    write_checkpoint(tmp_path, "test", {"number": 2}, {})

    assert read_generation(tmp_path, "test", "previous")[0] == {"number": 0}
