"""Fields on the wire have one reading, and long messages are refused unread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.errors import DamagedMessage
from fedbranch.privacy.wire import pack, unpack


@given(fields=st.lists(st.binary(max_size=50), max_size=10))
def test_fields_have_one_reading(fields):
    packed = pack(*fields)

    assert unpack(packed, [None] * len(fields)) == fields
    for other in range(12):
        if other != len(fields):
            with pytest.raises(DamagedMessage):
                unpack(packed, [None] * other)


def test_long_messages_are_refused_unread():
    with pytest.raises(DamagedMessage, match="a message of 5000 bytes"):
        unpack(bytes(5000), [None])


@pytest.mark.parametrize(
    ("blob", "sizes", "message"),
    [
        (pack(b"ab"), [3], "field 0 of a message claims 2 bytes; it must have 3"),
        (pack(b"ab")[:-1], [None], "field 0 of a message claims 2 bytes; it must have at most 1"),
        (pack(b"ab")[:-2], [None], "field 0 of a message claims 2 bytes; it must have at most 0"),
        (b"\0" * 3, [None], "ends before its field 0"),
        (pack(b"ab") + b"c", [2], "goes on for 1 bytes after its end"),
    ],
)
def test_damage_is_named(blob, sizes, message):
    with pytest.raises(DamagedMessage, match=message):
        unpack(blob, sizes)
