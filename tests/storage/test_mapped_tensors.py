"""Tensor files that are mapped into memory."""

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbranch.errors import DamagedFile
from fedbranch.storage.mapped_tensors import MappedTensors, safetensors_header


def mapped(path):
    with path.open("rb") as file:
        return MappedTensors(file, path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_tensors_are_what_safetensors_wrote(tmp_path):
    tensors = {"x": drawn(5, 3), "y": drawn(7)}
    path = tmp_path / "file"
    safetensors.numpy.save_file(tensors, path, metadata={"made": "elsewhere"})

    found = mapped(path)

    assert set(found) == {"x", "y"}
    assert len(found) == 2
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], tensor)
        assert not found[name].flags.writeable
    assert np.array_equal(found.row("x", 3), tensors["x"][3])
    assert b"".join(found.parts()) == path.read_bytes()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (100, 12345)])
def test_a_header_is_the_one_that_safetensors_writes(shape):
    tensor = drawn(*shape)

    content = safetensors_header("updates", shape) + tensor.tobytes()

    assert content == safetensors.numpy.save({"updates": tensor})


@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 100])
def test_blocks_of_rows_are_all_rows_in_order(tmp_path, rows_at_once):
    tensor = drawn(10, 2000)  # rows and pages do not end together
    path = tmp_path / "file"
    safetensors.numpy.save_file({"x": tensor}, path)

    blocks = [block.copy() for block in mapped(path).blocks("x", rows_at_once)]

    assert max(len(block) for block in blocks) <= rows_at_once
    assert np.array_equal(np.concatenate(blocks), tensor)


def test_a_mapped_file_can_be_removed_or_replaced(tmp_path):
    tensor, path = drawn(4, 4), tmp_path / "file"
    safetensors.numpy.save_file({"x": tensor}, path)
    found = mapped(path)
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    other.replace(path)

    found.remove()  # the name belongs to another file now
    found.put(tmp_path / "copy")

    assert path.read_bytes() == b"something else"
    assert np.array_equal(found["x"], tensor)
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "copy")["x"], tensor)


def test_a_file_that_was_changed_while_in_use_is_not_put_elsewhere(tmp_path):
    path = tmp_path / "file"
    safetensors.numpy.save_file({"x": drawn(4, 4)}, path)
    found = mapped(path)
    with path.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"x")

    with pytest.raises(DamagedFile, match="file was changed while it was in use"):
        found.put(tmp_path / "copy")

    assert not (tmp_path / "copy").exists()


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        3,
        {"x": 3},
        {"x": {}},
        {"x": {**ENTRY, "dtype": "F64"}},
        {"x": {**ENTRY, "shape": [2, 4]}},
        {"x": {**ENTRY, "shape": [-2, -3]}},
        {"x": {**ENTRY, "shape": [2.0, 3]}},
        {"x": {**ENTRY, "shape": [2**62, 2**62]}},
        {"x": {**ENTRY, "data_offsets": [8, 32]}},
        {"x": {**ENTRY, "data_offsets": [-24, 0]}},
        {"x": {**ENTRY, "data_offsets": [24]}},
    ],
)
def test_a_wrong_header_is_damage(tmp_path, header):
    text = json.dumps(header).encode()
    path = tmp_path / "file"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))

    with pytest.raises(DamagedFile, match="cannot be read"):
        mapped(path)


@given(st.lists(st.tuples(st.integers(0, 95), st.binary(min_size=1, max_size=4)), max_size=4))
@settings(max_examples=300)
def test_no_header_makes_it_read_outside_of_the_file(tmp_path_factory, edits):
    content = bytearray(safetensors.numpy.save({"x": drawn(2, 3)}))
    for place, new in edits:
        content[place : place + len(new)] = new
    path = tmp_path_factory.mktemp("fuzzed") / "file"
    path.write_bytes(content)

    try:
        found = mapped(path)
    except DamagedFile:
        return
    for name in found:
        assert found[name].tobytes() in bytes(content)


@pytest.mark.parametrize("content", [b"", b"1234567", (2**60).to_bytes(8, "little") + b"{}"])
def test_another_kind_of_file_is_damage(tmp_path, content):
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(DamagedFile, match="cannot be read"):
        mapped(tmp_path / "file")
