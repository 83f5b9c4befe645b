"""Raw updates against the matrix of updates."""

import numpy as np
import pytest

from fedbranch.core.exact_sum.raw_updates import Differences

pytest.importorskip("numba", reason="there is no machine code without Numba")


def in_pieces(came_back, lengths, headers):
    """Cut vectors into pieces of bytes, each behind a header of the given length."""
    ends = np.cumsum(lengths)
    return [
        b"x" * header + vector[end - length : end].tobytes()
        for vector in came_back
        for length, end, header in zip(lengths, ends, headers, strict=True)
    ]


@pytest.mark.parametrize(
    ("lengths", "headers"),
    [([5], [0]), ([0, 3, 0, 2, 0], [0, 7, 128, 1, 3]), ([1024, 1, 3000], [128, 128, 192])],
)
def test_written_updates_are_replies_minus_the_model_sent(lengths, headers):
    rng = np.random.default_rng(0)
    before = rng.normal(size=sum(lengths)).astype(np.float32)
    came_back = rng.normal(size=(4, sum(lengths))).astype(np.float32)
    came_back[2, 1] = np.nan

    updates = Differences(in_pieces(came_back, lengths, headers), headers, lengths, before)

    assert updates.shape == (4, sum(lengths))
    assert updates.written().tobytes() == (came_back - before).tobytes()
    assert updates.written([3, 1]).tobytes() == (came_back - before)[[3, 1]].tobytes()
    assert updates.written([]).shape == (0, sum(lengths))


def test_numbers_stay_as_long_as_the_updates_do():
    before = np.zeros(1000, np.float32)
    updates = Differences([np.full(1000, 7.0, np.float32).tobytes()], [0], [1000], before)
    others = [np.zeros(1000, np.float32).tobytes() for _ in range(50)]  # might reuse the memory

    assert (updates.written() == 7).all()
    assert others


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths"),
    [
        ([12, 8], [0, 0], [3, 3]),  # too short
        ([12, 12], [0, 4], [3, 3]),  # too short behind its header
        ([12, 12], [0, -4], [3, 3]),
        ([12, 12], [0, 0], [7, -1]),
        ([12, 12], [0, 0], [3, 2]),  # not as many numbers as were sent
        ([12, 12], [0], [3, 3]),
        ([12, 12, 12], [0, 0], [3, 3]),
        ([12, 12], [0, 2**63 - 8], [3, 3]),
        ([16, 16, 16, 16, 16], [0] * 5, [2**62] * 4 + [6]),  # modulo 2**64 that would fit
    ],
)
def test_pieces_that_would_be_read_beyond_their_end_are_refused(sizes, offsets, lengths):
    pieces = [bytes(size) for size in sizes]

    with pytest.raises(ValueError, match="cannot"):
        Differences(pieces, offsets, lengths, np.zeros(6, np.float32))


def test_pieces_that_are_taken_out_of_a_list_stay():
    before = np.zeros(1000, np.float32)
    pieces = [np.full(1000, 7.0, np.float32).tobytes()]
    updates = Differences(pieces, [0], [1000], before)

    pieces[0] = bytes(4000)

    assert (updates.written() == 7).all()


@pytest.mark.parametrize("kind", [bytearray, memoryview, np.frombuffer, type("Own", (bytes,), {})])
def test_only_bytes_are_read(kind):
    with pytest.raises(TypeError, match="bytes"):
        Differences([kind(bytes(8))], [0], [2], np.zeros(2, np.float32))
