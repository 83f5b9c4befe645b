import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.errors import DamagedFile, InvalidUpdate
from fedbranch.flower.arrays import Layout
from fedbranch.storage.checkpoint import read_checkpoint, write_checkpoint


def record(**arrays):
    return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})


MIXED = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.running_mean": np.float32([0.5, -0.5]),
    "a.num_batches_tracked": np.int64(7),
    "wide": np.float64([1e-9, 2.0]),
    "half": np.float16([1.5]),
    "wave": np.complex64([1 + 2j]),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
    "large": np.array([2**62 + 1, 5], np.uint64),
    "scalar": np.float32(3.0),
}


@pytest.fixture
def layout():
    return Layout.of(record(**MIXED))


def steps(layout, sent, reply):
    params, buffers = zeros(layout)
    layout.write_update(sent, reply, params, buffers)
    return params, buffers


def zeros(layout):
    return np.zeros(layout.num_params, np.float32), np.zeros(layout.num_buffers, np.float32)


def test_whole_numbers_and_normalisation_statistics_are_buffers(layout):
    assert layout.buffer_names == {"a.running_mean", "a.num_batches_tracked", "flags", "large"}
    assert layout.num_params == 6 + 2 + 1 + 2 + 0 + 1
    assert layout.num_buffers == 2 + 1 + 2 + 2


def test_no_displacement_gives_the_initial_model_to_the_bit(layout):
    arrays = layout.arrays_at(*zeros(layout))

    assert list(arrays) == list(MIXED)
    for name, array in arrays.items():
        assert array.dtype == MIXED[name].dtype
        assert array.shape == MIXED[name].shape
        assert array.tobytes() == np.asarray(MIXED[name]).tobytes()


def test_displacements_go_to_the_right_places(layout):
    params = np.arange(1, layout.num_params + 1, dtype=np.float32)
    buffers = np.float32([1, 2, 2.6, -1, 1, 4, -5])

    arrays = layout.arrays_at(params, buffers)

    np.testing.assert_array_equal(arrays["a.weight"], [[1, 3, 5], [7, 9, 11]])
    np.testing.assert_array_equal(arrays["wide"], [7 + 1e-9, 10])
    np.testing.assert_array_equal(arrays["wave"], [11 + 13j])
    assert arrays["scalar"] == 15
    assert arrays["a.num_batches_tracked"] == 10  # rounded
    assert arrays["flags"].tolist() == [False, True]
    assert arrays["large"].tolist() == [2**62 + 5, 0]  # beyond what a float can hold


def test_an_update_is_what_came_back_minus_what_was_sent(layout):
    sent = layout.arrays_at(*zeros(layout))
    reply = {name: np.array(array) for name, array in sent.items()}
    reply["wide"] = reply["wide"] + 0.25
    reply["a.num_batches_tracked"] = reply["a.num_batches_tracked"] + 3
    reply["large"] = reply["large"] - np.uint64(1)
    reply["wave"] = reply["wave"] + np.complex64(1j)

    params, buffers = steps(layout, sent, record(**reply))

    assert params.dtype == buffers.dtype == np.float32
    np.testing.assert_array_equal(params, [0] * 6 + [0.25, 0.25] + [0] + [0, 1] + [0])
    np.testing.assert_array_equal(buffers, [0, 0, 3, 0, 0, -1, -1])


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4),
    st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4),
)
def test_steps_undo_arrays_at(initial, step):
    layout = Layout.of(record(w=np.float32(initial)))
    no_buffers = np.zeros(0, np.float32)
    before = layout.arrays_at(np.zeros(4, np.float32), no_buffers)
    after = layout.arrays_at(np.float32(step), no_buffers)

    params, _ = steps(layout, before, layout.record(after))

    np.testing.assert_array_equal(
        params, np.float32(initial) + np.float32(step) - np.float32(initial)
    )


def test_a_mask_of_infinities_that_stays_has_not_moved():
    mask = np.float32([[0, -np.inf], [np.nan, 0]])
    layout = Layout.of(record(w=np.float32([1]), mask=mask), buffers=["mask"])
    sent = layout.arrays_at(np.zeros(1, np.float32), np.zeros(4, np.float32))

    _, buffers = steps(layout, sent, record(w=np.float32([2]), mask=mask))

    np.testing.assert_array_equal(buffers, np.zeros(4))


def test_the_order_of_the_arrays_in_a_reply_does_not_matter(layout):
    sent = layout.arrays_at(*zeros(layout))
    reply = {name: sent[name] + sent[name].dtype.type(1) for name in ("a.weight", "scalar")}
    forwards = steps(layout, sent, record(**{**sent, **reply}))

    backwards = steps(layout, sent, record(**dict(reversed({**sent, **reply}.items()))))

    np.testing.assert_array_equal(forwards[0], backwards[0])


@pytest.mark.parametrize(
    ("arrays", "buffers", "problem"),
    [
        ({"n": np.int64([1])}, None, "has no parameters"),
        ({}, None, "has no parameters"),
        ({"w": np.float32([1])}, ["v"], r"buffers names \['v'\]"),
        ({"w": np.float32([1]), "n": np.int64([1])}, [], r"\['n'\] hold whole numbers"),
        ({"w": np.float32([np.nan])}, None, "'w' of the initial model contains NaN"),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_error(arrays, buffers, problem):
    with pytest.raises(ValueError, match=problem):
        Layout.of(record(**arrays), buffers)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">c8", ">i8"])
def test_the_order_of_bytes_does_not_matter(dtype, tmp_path):
    layout = Layout.of(record(w=np.float32([1]), x=np.array([1, 2], dtype)))
    write_checkpoint(tmp_path, "initial model", *layout.to_state())

    loaded = Layout.from_state(*read_checkpoint(tmp_path, "initial model"))

    assert loaded.initial["x"].tolist() == layout.initial["x"].tolist() == [1, 2]


def test_numbers_of_more_than_64_bits_are_an_error():
    with pytest.raises(TypeError, match="at most 64 bits"):
        Layout.of(record(w=np.array([1], np.longdouble)))


def test_nan_in_a_parameter_is_an_error_whatever_the_buffers_are():
    with pytest.raises(ValueError, match="'w' of the initial model contains NaN"):
        Layout.of(record(w=np.float32([np.nan]), b=np.float32([1])), buffers=["b"])


def test_columns_first_is_read_as_well(layout):
    sent = layout.arrays_at(*zeros(layout))
    weight = np.asfortranarray(sent["a.weight"] + np.float32([[1, 2, 3], [4, 5, 6]]))

    params, _ = steps(layout, sent, record(**{**sent, "a.weight": weight}))

    np.testing.assert_array_equal(params[:6], [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_bytes_that_are_missing_or_too_many_are_refused(layout, change):
    sent = layout.arrays_at(*zeros(layout))
    reply = dict(record(**sent).items())
    reply["a.weight"] = Array("float32", (2, 3), "numpy.ndarray", change(reply["a.weight"].data))

    with pytest.raises(InvalidUpdate, match="it needs 24"):
        steps(layout, sent, ArrayRecord(reply))


def test_a_bad_reply_writes_nothing(layout):
    sent = layout.arrays_at(*zeros(layout))
    reply = {**sent, "a.weight": sent["a.weight"] + 1, "scalar": np.zeros(7, np.float32)}
    params, buffers = zeros(layout)

    with pytest.raises(InvalidUpdate, match="'scalar'"):
        layout.write_update(sent, record(**reply), params, buffers)

    assert not params.any()


def test_arrays_of_words_are_an_error():
    with pytest.raises(TypeError, match="'words' has dtype <U1"):
        Layout.of(record(w=np.float32([1]), words=np.array(["a"])))


def test_a_header_that_promises_too_much_costs_no_memory(layout):
    sent = layout.arrays_at(*zeros(layout))
    reply = dict(record(**sent).items())
    lie = reply["a.weight"].data.replace(b"(2, 3), }" + 12 * b" ", b"(2000000000000, 3), }")
    assert len(lie) == len(reply["a.weight"].data)
    assert lie != reply["a.weight"].data
    reply["a.weight"] = Array("float32", (2, 3), "numpy.ndarray", lie)

    with pytest.raises(
        InvalidUpdate, match=r"'a\.weight' has dtype float32 and shape \(2000000000000"
    ):
        steps(layout, sent, ArrayRecord(reply))


def test_a_saved_layout_comes_back_to_the_bit(layout, tmp_path):
    write_checkpoint(tmp_path, "initial model", *layout.to_state())

    loaded = Layout.from_state(*read_checkpoint(tmp_path, "initial model"))

    assert loaded.buffer_names == layout.buffer_names
    assert loaded.describe() == layout.describe()
    for name, array in layout.initial.items():
        assert loaded.initial[name].tobytes() == array.tobytes()


def test_a_layout_that_contradicts_itself_is_damaged(layout):
    state, files = layout.to_state()
    state["arrays"][0]["shape"] = [5]

    with pytest.raises(DamagedFile, match="contradicts itself"):
        Layout.from_state(state, files)
