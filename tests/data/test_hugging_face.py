"""Datasets of Hugging Face and partitions of Flower Datasets, as the libraries make them.

They are skipped without the libraries; ``make test-datasets`` installs them into an environment
of their own. test_examples.py has the same interface without them.
"""

import numpy as np
import pytest
import torch

from fedbranch import AutoRule, ClientData, simulate
from fedbranch.data import digits, label_swaps
from fedbranch.sim import mlp

datasets = pytest.importorskip("datasets")
partitioners = pytest.importorskip("flwr_datasets.partitioner")

pytestmark = [
    pytest.mark.datasets,
    pytest.mark.filterwarnings("default"),  # the libraries have warnings of their own
]

PIXELS = np.arange(5 * 4 * 6 * 3, dtype=np.uint8).reshape(5, 4, 6, 3)
LABELS = [0, 1, 2, 1, 0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def table():
    features = np.arange(10, dtype=np.float32).reshape(5, 2)
    return datasets.Dataset.from_dict({"features": features.tolist(), "label": LABELS})


def images(pixels):
    return datasets.Dataset.from_dict(
        {"img": list(pixels), "label": LABELS},
        features=datasets.Features(
            {"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
        ),
    )


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_a_table_goes_in_as_it_is(table, kind):
    client = ClientData(table.with_format(kind))

    assert (client.train.x.dtype, client.train.y.dtype) == (np.float32, np.int64)
    assert client.train.x.tolist() == table["features"][:]
    assert client.train.y.tolist() == LABELS


@pytest.mark.parametrize("kind", [None, "torch"])
def test_colour_images_get_their_channels_first(kind):
    client = ClientData(images(PIXELS).with_format(kind))

    assert client.train.x.dtype == np.uint8
    np.testing.assert_array_equal(client.train.x, PIXELS.transpose(0, 3, 1, 2))
    assert client.train.y.tolist() == LABELS


def test_gray_images_get_one_channel():
    client = ClientData(images(PIXELS[..., 0]))

    np.testing.assert_array_equal(client.train.x, PIXELS[:, None, :, :, 0])


def test_arrays_of_numpy_keep_their_shape():
    client = ClientData(images(PIXELS).with_format("numpy"))

    np.testing.assert_array_equal(client.train.x, PIXELS)


def test_a_transform_is_applied_once():
    def as_tensors(batch):
        arrays = [np.asarray(image).transpose(2, 0, 1) for image in batch["img"]]
        return {"img": [torch.tensor(a) / 255 for a in arrays], "label": batch["label"]}

    client = ClientData(images(PIXELS).with_transform(as_tensors))

    assert client.train.x.dtype == np.float32
    expected = PIXELS.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(client.train.x, expected)


def test_parts_of_a_split_are_train_and_test(table):
    parts = table.train_test_split(test_size=2, seed=0)

    client = ClientData(parts["train"], parts["test"])

    assert sorted([*client.train.y, *client.test.y]) == sorted(LABELS)
    with pytest.raises(ValueError, match=r"a DatasetDict with the parts \['test', 'train'\]"):
        ClientData(parts)


def test_the_remedy_for_other_columns_works(table):
    wide = table.rename_column("label", "fine_label").add_column("coarse_label", LABELS)
    with pytest.raises(ValueError, match=r"use dataset\.select_columns\(\[\.\.\.\]\) and"):
        ClientData(wide)

    narrow = wide.select_columns(["features", "fine_label"])
    client = ClientData(narrow.rename_column("fine_label", "label"))

    assert client.train.y.tolist() == LABELS


def test_texts_are_refused_with_what_to_do():
    texts = datasets.Dataset.from_dict({"text": ["a b", "c"], "label": [0, 1]})

    with pytest.raises(ValueError, match="inputs of type <U3; models take numbers"):
        ClientData(texts)


def test_a_stream_is_refused(table):
    with pytest.raises(TypeError, match="IterableDataset, which has no length"):
        ClientData(table.to_iterable_dataset())


@pytest.mark.parametrize(
    "partitioner",
    [
        partitioners.IidPartitioner(num_partitions=4),
        partitioners.DirichletPartitioner(
            num_partitions=4, partition_by="label", alpha=1.0, min_partition_size=5, seed=1
        ),
    ],
    ids=["iid", "dirichlet"],
)
def test_partitions_of_flower_are_clients(partitioner):
    x, y = digits()
    partitioner.dataset = datasets.Dataset.from_dict({"image": x[:200], "label": y[:200]})

    clients = [ClientData(partitioner.load_partition(number)) for number in range(4)]

    assert clients[0].train.x.shape[1:] == (1, 8, 8)
    assert sum(len(client.train.y) for client in clients) == 200
    found = np.concatenate([client.train.x for client in clients])
    np.testing.assert_array_equal(
        np.sort(found.reshape(200, -1), axis=0), np.sort(x[:200].reshape(200, -1), axis=0)
    )


def test_a_federated_dataset_of_a_file_is_read(tmp_path):
    from flwr_datasets import FederatedDataset

    path = tmp_path / "rows.csv"
    path.write_text("x,label\n" + "".join(f"{i}.5,{i % 2}\n" for i in range(12)))
    federated = FederatedDataset(
        dataset="csv",
        partitioners={"train": partitioners.IidPartitioner(num_partitions=3)},
        data_files={"train": str(path)},
        cache_dir=str(tmp_path / "cache"),
    )

    clients = [ClientData(federated.load_partition(number)) for number in range(3)]

    assert sorted(v for client in clients for v in client.train.x) == [i + 0.5 for i in range(12)]


def test_partitions_train_as_their_arrays_do():
    x, y = digits()
    swaps = label_swaps(2, seed=0)
    rng = np.random.default_rng(0)
    federations = {"datasets": {}, "arrays": {}}
    for number in range(4):
        rows = slice(250 * number, 250 * number + 250)
        own_x, own_y = swaps[number % 2](x[rows], y[rows], rng)
        table = datasets.Dataset.from_dict({"image": own_x, "label": own_y})
        federations["datasets"][f"client-{number}"] = ClientData(table, table)
        federations["arrays"][f"client-{number}"] = ClientData((own_x, own_y), (own_x, own_y))

    model = mlp([1, 8, 8], 10, hidden=[16], seed=0)
    first, second = (
        simulate(model, federation, rule=AutoRule(), rounds=2, seed=0)
        for federation in federations.values()
    )

    assert first.clusters == second.clusters
    assert first.evaluation == second.evaluation
