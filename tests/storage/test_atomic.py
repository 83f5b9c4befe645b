"""Single files: written as a whole or not at all."""

import hashlib

import pytest

from fedbranch.errors import CannotWrite, DamagedFile, FedbranchError
from fedbranch.storage.atomic import (
    add_tensor_file,
    append_line,
    link_file,
    open_plain,
    replace_file,
    replace_file_in_parts,
)


def test_a_missing_file_and_one_that_is_not_plain_are_different_errors(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")

    for path in (tmp_path / "nothing", tmp_path / "file" / "inside"):
        with pytest.raises(FileNotFoundError):
            open_plain(path)
    with pytest.raises(DamagedFile, match="folder cannot be read: it is no plain file"):
        open_plain(tmp_path / "folder")
    with pytest.raises(DamagedFile, match="it has 5 bytes instead of 6"):
        open_plain(tmp_path / "file", num_bytes=6)
    with open_plain(tmp_path / "file", num_bytes=5) as file:
        assert file.read() == b"12345"


@pytest.mark.parametrize("write_it", [replace_file, append_line])
def test_a_file_that_cannot_be_written_is_an_os_error_with_path_and_size(tmp_path, write_it):
    path = tmp_path / "nowhere" / "file"

    with pytest.raises(CannotWrite, match=r"nowhere/file cannot be written \(5 bytes\)") as caught:
        write_it(path, b"12345")

    assert isinstance(caught.value, FedbranchError)
    assert isinstance(caught.value, OSError)
    assert (caught.value.filename, caught.value.errno) == (str(path), 2)


def test_a_file_in_parts_is_written_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def parts(*contents):
        for content in contents:
            if content is None:
                raise KeyboardInterrupt
            yield content

    with pytest.raises(KeyboardInterrupt):
        replace_file_in_parts(path, parts(b"12", None), 5)
    assert path.read_bytes() == b"old"

    replace_file_in_parts(path, parts(b"12", b"", memoryview(b"345")), 5)

    assert path.read_bytes() == b"12345"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_several_writers_may_add_the_same_tensor_file_at_once(tmp_path):
    found = []

    def parts(depth):
        yield b"12"
        if depth:  # another writer writes the whole file meanwhile
            write(depth - 1)
        yield memoryview(b"345")

    def write(depth):
        file, path, digest = add_tensor_file(tmp_path, "edge", parts(depth), 5)
        with file:
            path.unlink()  # another writer no longer needs it
            found.append((file.read(), path.name, digest))

    write(2)

    digest = hashlib.sha256(b"12345").hexdigest()
    assert found == [(b"12345", f"edge-{digest[:16]}.safetensors", digest)] * 3
    assert not list(tmp_path.iterdir())


def test_temporary_tensor_files_of_a_crash_are_removed_by_the_next_write(tmp_path):
    left = tmp_path / f"edge-{'0' * 16}.safetensors.tmp"
    left.write_bytes(b"half")
    (tmp_path / "edge-mine.tmp").write_bytes(b"precious")

    def parts():
        yield b"1"
        assert not left.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_tensor_file(tmp_path, "edge", parts(), 1)

    assert [path.name for path in tmp_path.iterdir()] == ["edge-mine.tmp"]


def test_a_linked_file_is_the_same_file_and_stays_without_its_first_name(tmp_path):
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_bytes(b"12345")
    path.write_bytes(b"in the way")

    assert link_file(source, path)
    assert link_file(source, path)  # again
    assert path.samefile(source)
    source.unlink()

    assert path.read_bytes() == b"12345"
    assert not link_file(source, tmp_path / "nothing")
    assert not link_file(path, tmp_path / "nowhere" / "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["path"]


def test_a_link_that_a_crash_has_left_is_not_written_through(tmp_path):
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_bytes(b"precious")
    (tmp_path / "path.tmp").hardlink_to(source)

    replace_file(path, b"new")

    assert source.read_bytes() == b"precious"
    assert path.read_bytes() == b"new"
