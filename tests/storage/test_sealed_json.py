"""Sealed JSON documents."""

import json

import pytest

from fedbranch.errors import DamagedFile
from fedbranch.storage.atomic import replace_file
from fedbranch.storage.sealed_json import read_sealed, seal, unseal


def test_a_change_of_any_bit_of_a_sealed_document_is_noticed():
    document = {"round": 3, "loss": 0.125, "name": "ä"}
    for content in (seal(document), seal(document, indent=1)):
        assert unseal(content) == document
        assert json.loads(content)["loss"] == 0.125
        for place in range(8 * len(content)):
            changed = bytearray(content)
            changed[place // 8] ^= 1 << place % 8
            try:
                assert unseal(bytes(changed)) == document  # white space at the end
            except ValueError:
                continue


def test_a_sealed_file_is_read_and_named_if_it_was_changed(tmp_path):
    path = tmp_path / "document.json"
    replace_file(path, seal({"round": 3}))
    assert read_sealed(path) == {"round": 3}

    path.write_bytes(path.read_bytes().replace(b"3", b"4", 1))

    with pytest.raises(DamagedFile, match=r"document\.json cannot be read: it was changed"):
        read_sealed(path)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"round": 3}', b"[]", b"\xff", b'"sha256"'])
def test_what_was_never_sealed_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match="no SHA-256 at its end"):
        unseal(content)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"file cannot be read: .*no SHA-256 at its end"):
        read_sealed(tmp_path / "file")


def test_a_missing_sealed_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_sealed(tmp_path / "nothing")
