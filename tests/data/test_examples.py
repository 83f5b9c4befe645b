"""Examples from arrays, tensors and datasets."""

import numpy as np
import pytest
import torch

from fedbranch import ClientData

X = np.arange(200, dtype=np.float32).reshape(100, 2)
Y = np.arange(100) % 10


@pytest.mark.parametrize(
    "train",
    [
        (X, Y),
        (X.tolist(), Y.tolist()),
        (torch.tensor(X), torch.tensor(Y)),
        torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)),
        [(X[i], Y[i]) for i in range(100)],
    ],
    ids=["arrays", "lists", "tensors", "dataset", "pairs"],
)
def test_data_may_come_as_arrays_tensors_or_datasets(train):
    client = ClientData(train)

    assert client.train.x.dtype == np.float32
    assert np.array_equal(client.train.x, X)
    assert np.array_equal(client.train.y, Y)
    assert client.test is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((X, Y[:-1]), r"\(100, 2\) and targets of shape \(99,\)"),
        ((X,), "tuple of 1"),
        ((X[:0], Y[:0]), "no examples"),
        ([], "no examples"),
        ([X, Y], "items that are not pairs of an input and a target; pass arrays as a tuple"),
        ((1.0, 2.0), "one row for each example"),
    ],
)
def test_bad_data_are_named(train, message):
    with pytest.raises(ValueError, match=message):
        ClientData(train)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, ">i8", bool])
def test_whole_number_targets_become_what_losses_expect(dtype):
    client = ClientData((X.astype(">f4")[::-1], (Y % 2).astype(dtype)))

    assert client.train.y.dtype == np.int64
    assert client.train.x.dtype == np.float32
    assert client.train.x.flags.c_contiguous
    torch.as_tensor(client.train.x)
    assert np.array_equal(client.train.x, X[::-1])


def test_inputs_that_are_not_floats_stay_as_they_are():
    assert (
        ClientData((np.arange(4, dtype=np.uint8)[:, None], [0, 1, 0, 1])).train.x.dtype == np.uint8
    )


# Datasets with named columns, as those of Hugging Face and Flower; the libraries themselves are
# in test_hugging_face.py.


class Columns:
    """Rows by number, each a dict of columns, as a ``datasets.Dataset`` gives them."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, number):
        if number >= len(self):
            raise IndexError(number)
        return {name: values[number] for name, values in self.columns.items()}


class Image:
    """An image by the interface of Pillow."""

    def __init__(self, pixels, mode):
        self.pixels, self.mode = np.asarray(pixels), mode

    def getbands(self):
        return tuple(self.mode)

    def convert(self, mode):
        if mode == self.mode:
            return self
        return Image({"L": self.pixels.astype(np.uint8) * 255}[mode], mode)

    def __array__(self, dtype=None, copy=None):
        return self.pixels


@pytest.mark.parametrize("target", ["label", "labels", "target", "targets", "y"])
@pytest.mark.parametrize("target_is_first", [False, True])
def test_rows_with_named_columns_are_inputs_and_targets(target, target_is_first):
    columns = {"features": X.tolist(), target: Y.tolist()}
    names = sorted(columns, key=lambda name: (name == target) != target_is_first)

    client = ClientData(Columns(**{name: columns[name] for name in names}))

    assert (client.train.x.dtype, client.train.y.dtype) == (np.float32, np.int64)
    assert np.array_equal(client.train.x, X)
    assert np.array_equal(client.train.y, Y)


@pytest.mark.parametrize(
    ("mode", "shape", "expected"),
    [("L", (2, 3), (1, 2, 3)), ("RGB", (2, 3, 3), (3, 2, 3)), ("RGBA", (2, 3, 4), (4, 2, 3))],
)
def test_images_become_bytes_with_channels_first(mode, shape, expected):
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)

    x, y = ClientData(Columns(img=[Image(pixels, mode)] * 2, label=[3, 4])).train

    assert (x.shape, x.dtype, y.tolist()) == ((2, *expected), np.uint8, [3, 4])
    for channel in range(expected[0]):
        plane = pixels if mode == "L" else pixels[:, :, channel]
        assert np.array_equal(x[1, channel], plane)


def test_images_of_one_bit_become_bytes():
    x, _ = ClientData(Columns(image=[Image([[True, False]], "1")], label=[0])).train

    assert (x.dtype, x.tolist()) == (np.uint8, [[[[255, 0]]]])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            Columns(img=[1], fine=[2], label=[3]),
            r"columns \['img', 'fine', 'label'\]; it needs one",
        ),
        (Columns(img=[1], fine_label=[2]), "called 'label' or 'labels'"),
        (Columns(label=[1], target=[2]), "it needs one column with inputs"),
        (Columns(img=[1], label=[2], labels=[2]), r"dataset.select_columns\(\[...\]\)"),
        ([{"x": 1.0, "y": 1}, {"x": 1.0}], r"\['x', 'y'\] in row 0 and \['x'\] in row 1"),
        (Columns(text=["a", "b"], label=[0, 1]), "train has inputs of type <U1; models take"),
        (Columns(x=[1.0], label=["cat"]), "train has targets of type <U3; models take numbers"),
        ((["a", "b"], [0, 1]), "train has inputs of type <U1"),
        ({"train": [], "test": []}, r"a dict with the parts \['test', 'train'\]; pass one of"),
        (
            Columns(x=[np.zeros((2, 2)), np.zeros((2, 3))], y=[0, 1]),
            r"an input of shape \(2, 2\) in row 0 and of \(2, 3\) in row 1; pad or cut",
        ),
        ([(0.0, [1]), (0.0, [1, 2])], r"a target of shape \(1,\) in row 0 and of \(2,\) in row 1"),
    ],
)
def test_datasets_that_are_no_inputs_and_targets_are_named(train, message):
    with pytest.raises(ValueError, match=message):
        ClientData(train)


@pytest.mark.parametrize("train", [iter([(0.0, 1)]), (pair for pair in [(0.0, 1)])])
def test_data_that_can_only_be_read_in_turn_are_refused(train):
    with pytest.raises(TypeError, match=r"which has no length or no items by number; pass arrays"):
        ClientData(train)
