"""Many replies read at once, against each by itself."""

from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.flower.arrays import Layout
from fedbranch.flower.read_updates import UpdateReader

MODEL = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.running_mean": np.float32([0.5, np.inf]),
    "a.num_batches_tracked": np.int64(7),
    "bias": np.float32([0.25, -0.5, 1e-3]),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(3.0),
}


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def trained(seed, **changes):
    rng = np.random.default_rng(seed)
    arrays = {
        name: array + rng.normal(size=np.shape(array)).astype(np.float32)
        if array.dtype == np.float32
        else array + np.int64(seed)
        for name, array in MODEL.items()
    }
    return arrays | changes


def reply(seed, **changes):
    return record(trained(seed, **changes))


def with_bytes(data, stype="numpy.ndarray"):
    changed = reply(3)
    array = changed["bias"]
    array.data, array.stype = data(array.data), stype
    return changed


REPLIES = [
    reply(0),
    reply(1),
    reply(2, **{"a.weight": np.asfortranarray(trained(2)["a.weight"])}),  # an unusual header
    reply(3, bias=np.float32([np.nan, np.inf, 3e38])),
    reply(4, bias=np.float64([1, 2, 3])),
    reply(5, bias=np.float32([1, 2])),
    reply(6, more=np.float32([1])),
    record({name: array for name, array in trained(7).items() if name != "scalar"}),
    with_bytes(lambda data: data[:-1]),
    with_bytes(lambda data: data + b"x"),
    with_bytes(lambda data: b"\x93NUMPY" + bytes(len(data) - 6)),
    with_bytes(lambda data: data, stype="pickle"),
    with_bytes(bytearray),  # bytes that may move to another address
    reply(8),
]
NUM_READABLE = 6


@pytest.fixture(params=["numpy", "compiled"])
def reader(request):
    """Make readers that read by NumPy, or in machine code."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="there is no machine code without Numba")
        return partial(UpdateReader, most_params_without_machine_code=0)
    return partial(UpdateReader, most_params_without_machine_code=10**9)


def read_at_once(reader, layout, sent, replies):
    """Read replies, and write down the updates of those that could be read."""
    params = np.zeros((len(replies), layout.num_params), np.float32)
    buffers = np.zeros((len(replies), layout.num_buffers), np.float32)
    parts, problems = reader(layout, sent).read(replies)
    for places, updates, own_buffers in parts:
        is_there = isinstance(updates, Differences)
        params[places] = updates.written() if is_there else updates
        buffers[places] = own_buffers
    return params, buffers, problems


def read_one_by_one(layout, sent, replies):
    params = np.zeros((len(replies), layout.num_params), np.float32)
    buffers = np.zeros((len(replies), layout.num_buffers), np.float32)
    unread = set()
    for row, one in enumerate(replies):
        try:
            layout.write_update(sent, one, params[row], buffers[row])
        except Exception:
            unread.add(row)
    return params, buffers, unread


def test_many_replies_at_once_give_the_same_bits_as_one_by_one(reader):
    layout = Layout.of(record(MODEL))
    rng = np.random.default_rng(0)
    sent = layout.arrays_at(
        rng.normal(size=layout.num_params).astype(np.float32),
        rng.normal(size=layout.num_buffers).astype(np.float32),
    )
    params, buffers, unread = read_one_by_one(layout, sent, REPLIES)

    found_params, found_buffers, problems = read_at_once(reader, layout, sent, REPLIES)

    assert problems.keys() == unread
    assert len(REPLIES) - len(unread) == NUM_READABLE
    readable = sorted(set(range(len(REPLIES))) - unread)
    assert found_params[readable].tobytes() == params[readable].tobytes()
    assert found_buffers[readable].tobytes() == buffers[readable].tobytes()


def test_a_reply_that_cannot_be_read_says_why(reader):
    layout = Layout.of(record(MODEL))

    _, problems = reader(layout, layout.initial).read(REPLIES)

    assert "missing ['scalar']" in problems[7]
    assert "needs 12" in problems[8]
    assert "serialised as 'pickle'" in problems[11]


def test_replies_as_flower_serialises_them_are_not_copied():
    pytest.importorskip("numba", reason="there is no machine code without Numba")
    layout = Layout.of(record(MODEL))

    reader = UpdateReader(layout, layout.initial, most_params_without_machine_code=0)
    (usual, unusual), _ = reader.read(REPLIES)

    assert usual.places == [0, 1, 3, 13]
    assert isinstance(usual.params, Differences)
    assert unusual.places == [2, 12]


def test_models_of_other_types_are_read_by_numpy():
    model = {"wide": np.float64([1.0, 2.0]), "usual": np.float32([3.0])}
    layout = Layout.of(record(model))
    came_back = record({"wide": model["wide"] + 1e-9, "usual": np.float32([3.5])})

    reader = UpdateReader(layout, layout.initial, most_params_without_machine_code=0)
    (part,), problems = reader.read([came_back])

    assert not problems
    np.testing.assert_allclose(part.params, [[1e-9, 1e-9, 0.5]], rtol=1e-6)


class Labelled(bytes):
    """Bytes that begin at another offset of their object than plain bytes do."""

    label = "mine"


def test_other_types_than_plain_bytes_are_copied():
    layout = Layout.of(record(MODEL))
    replies = [with_bytes(Labelled)]
    expected, _, _ = read_one_by_one(layout, layout.initial, [reply(3)])

    reader = partial(UpdateReader, most_params_without_machine_code=0)
    params, _, problems = read_at_once(reader, layout, layout.initial, replies)

    assert not problems
    assert params.tobytes() == expected.tobytes()
