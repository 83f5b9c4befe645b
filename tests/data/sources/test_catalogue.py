"""Data sets by name: what is found, checked and fetched."""

import json
import re

import pytest

from data.sources.file_server import FileServer, downloads_of
from data.sources.small_sets import ARTICLES, news_csv, put
from fedbranch.data import sources
from fedbranch.data.sources.catalogue import SOURCES


def test_look_says_what_is_there_without_reading_it(tmp_path):
    put(tmp_path / "ag_news", {"train.csv": b"anything"})

    news, plays = (sources.look(name, tmp_path) for name in ("ag_news", "shakespeare"))

    assert (news.missing, news.num_bytes, news.checked) == (["test.csv"], 8, None)
    assert (plays.missing, plays.num_bytes) == (["roles.jsonl"], 0)
    assert not sources.is_present("ag_news", tmp_path)
    assert sources.is_present("digits", tmp_path)
    assert json.loads(json.dumps(news.to_json()))["is_complete"] is False


def test_check_says_what_is_in_it(tmp_path):
    files = {"train.csv": news_csv("train"), "test.csv": news_csv("test", columns=2)}
    put(tmp_path / "ag_news", files)

    news = sources.check("ag_news", tmp_path)

    assert news.folder == tmp_path / "ag_news"
    assert (news.parts["train"].rows, news.parts["train"].classes) == (4, 4)
    assert news.parts["train"].published_rows == 120_000
    assert news.parts["test"].num_bytes == len(files["test.csv"])
    assert news.checked == "readable"


def test_digits_are_always_there(tmp_path):
    part = sources.check("digits", tmp_path).parts["all"]

    assert (part.rows, part.classes) == (1797, 10)


def test_an_unknown_set_is_an_error_that_names_the_nearest():
    for function in (sources.look, sources.check, sources.fetch):
        with pytest.raises(ValueError, match="no data set 'mnits'; did you mean 'mnist'"):
            function("mnits")


def test_a_fetched_set_is_checked(tmp_path):
    files = {f"{part}.csv": news_csv(part) for part in ARTICLES}
    with FileServer(files) as server:
        news = sources.fetch("ag_news", tmp_path, downloads=downloads_of(files, server.url))

    assert news.checked == "recorded"
    assert [part.rows for part in news.parts.values()] == [4, 2]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_set_has_all_its_files_on_two_mirrors_or_none(source):
    offered = [name for download in source.downloads for name in download.file_names]

    assert sorted(offered) == (sorted(source.file_names) if source.downloads else [])
    for download in source.downloads:
        assert re.fullmatch("[0-9a-f]{64}", download.sha256)
        assert len(set(download.urls)) == 2
        assert all(re.match(f"https?://.+/{download.name}$", url) for url in download.urls)
    digests = [download.sha256 for download in source.downloads]
    assert len(set(digests)) == len(digests)
