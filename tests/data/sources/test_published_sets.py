"""The published data sets themselves, where they are: in ``$FEDBRANCH_DATA`` or the cache."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from data.sources.file_server import FileServer, archive_of, downloads_of
from data.sources.small_sets import sha256
from fedbranch.data import ag_news, cifar10, fashion_mnist, mnist, shakespeare, sources
from fedbranch.data.sources.catalogue import SOURCES


def needs(name):
    where = sources.default_data_dir()
    return pytest.mark.skipif(not sources.is_present(name), reason=f"no {name} in {where}")


def unpacked(name):
    """The files of a set, as they are in the data folder."""
    source = SOURCES[name]
    return {file: source.read(source.path(file)) for file in source.file_names}


LOADERS = {"mnist": mnist, "fashion_mnist": fashion_mnist}
IDX_SETS = [pytest.param(name, marks=needs(name)) for name in LOADERS]


@pytest.mark.parametrize("name", IDX_SETS)
def test_idx_sets_are_complete(name):
    train, test = (LOADERS[name](part, raw=True) for part in ("train", "test"))

    assert (train.x.shape, test.x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert np.bincount(test.y).sum() == 10_000


@pytest.mark.parametrize("name", IDX_SETS)
def test_idx_sets_in_gzip_are_fetched_as_the_published_ones(name, tmp_path):
    packed = {f"{file}.gz": gzip.compress(content, 1) for file, content in unpacked(name).items()}
    with FileServer(packed) as server:
        holding = sources.fetch(name, tmp_path, downloads=downloads_of(packed, server.url))

    assert holding.checked == "published"
    assert holding.parts["train"].rows == 60_000


@needs("cifar10")
def test_cifar_in_an_archive_is_fetched_as_the_published_one(tmp_path):
    files = unpacked("cifar10")
    (table,) = SOURCES["cifar10"].downloads
    packed = archive_of(files)
    with FileServer({table.name: packed}) as server:
        own = replace(table, sha256=sha256(packed), urls=(server.url + table.name,))
        holding = sources.fetch("cifar10", tmp_path, downloads=[own])

    assert holding.checked == "published"
    assert [part.rows for part in holding.parts.values()] == [50_000, 10_000]


@pytest.mark.parametrize(
    ("source", "download"),
    [
        pytest.param(source, download, id=f"{source.name}-{download.name}")
        for source in SOURCES.values()
        for download in source.downloads
    ],
)
def test_a_file_as_it_is_published_has_its_hash(source, download):
    path = source.folder() / download.name
    if not path.is_file():
        pytest.skip(f"no {path}")

    assert sha256(path.read_bytes()) == download.sha256


@needs("cifar10")
def test_cifar_is_complete():
    holding = sources.check("cifar10")

    assert holding.checked == "published"
    assert [part.rows for part in holding.parts.values()] == [50_000, 10_000]
    assert np.bincount(cifar10("test", raw=True).y).tolist() == [1000] * 10


@needs("ag_news")
def test_articles_are_of_four_topics():
    texts, topics = ag_news("test")

    assert np.bincount(topics).tolist() == [1900] * 4
    assert texts[0].startswith("Fears for T N pension after talks Unions representing")
    assert topics[0] == sources.AG_NEWS_TOPICS.index("Business")


@needs("shakespeare")
def test_roles_speak():
    roles = shakespeare()

    assert len({(role.play, role.role) for role in roles}) == len(roles)
    assert any("To be, or not to be" in speech for role in roles for speech in role.speeches)
