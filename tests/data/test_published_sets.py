"""The published data sets themselves, where they are: in ``$FEDBRANCH_DATA`` or the cache."""

import numpy as np
import pytest

from fedbranch.data import ag_news, cifar10, fashion_mnist, mnist, shakespeare, sources


def needs(name):
    where = sources.default_data_dir()
    return pytest.mark.skipif(not sources.is_present(name), reason=f"no {name} in {where}")


LOADERS = {"mnist": mnist, "fashion_mnist": fashion_mnist}
IDX_SETS = [pytest.param(name, marks=needs(name)) for name in LOADERS]


@pytest.mark.parametrize("name", IDX_SETS)
def test_idx_sets_are_complete(name):
    train, test = (LOADERS[name](part, raw=True) for part in ("train", "test"))

    assert (train.x.shape, test.x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert np.bincount(test.y).sum() == 10_000


@pytest.mark.parametrize("name", IDX_SETS)
def test_the_hub_would_give_the_published_files(name, tmp_path):
    def load_dataset(hub_id, *, split):
        x, y = LOADERS[name](split, raw=True)
        return ({"image": image[0], "label": int(label)} for image, label in zip(x, y, strict=True))

    holding = sources.fetch(name, tmp_path, load_dataset=load_dataset)

    assert holding.checked == "published"
    assert holding.parts["train"].rows == 60_000


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
