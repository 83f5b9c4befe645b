"""Client ids in arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.population import pack_ids, unpack_ids

ANY_TEXT = st.text(st.characters(codec=None), max_size=5)  # lone surrogates, too


@given(st.lists(ANY_TEXT, min_size=1))
def test_any_ids_are_unpacked_as_they_were(client_ids):
    assert unpack_ids(pack_ids(client_ids)) == client_ids


@pytest.mark.parametrize(
    ("content", "ends"),
    [
        (b"ab", []),
        (b"ab", [2, 1]),
        (b"ab", [1]),
        (b"ab", [1, 3]),
        ("aä".encode(), [2, 3]),  # within a character
        (b"a\xff", [1, 2]),
    ],
)
def test_arrays_that_are_no_packed_ids_are_refused(content, ends):
    tensors = {"packed": np.frombuffer(content, np.uint8), "ends": np.array(ends, np.uint32)}

    with pytest.raises(ValueError, match=r"ids do not make up|within a character|decode"):
        unpack_ids(tensors)
