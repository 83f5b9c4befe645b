"""Articles and roles from files in their own formats: what is read, and what is refused."""

import gzip

import numpy as np
import pytest

from data.sources.small_sets import (
    ARTICLES,
    ROLES,
    news_csv,
    put,
    roles_jsonl,
    sha256,
    small_news,
    small_plays,
)
from fedbranch.data.sources.files import SUMS_FILE
from fedbranch.errors import DamagedFile


def refusal(load, *arguments):
    with pytest.raises(DamagedFile) as caught:
        load(*arguments)
    return str(caught.value)


def in_gzip(path):
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_news_have_title_and_description_in_one_text(tmp_path, columns, is_packed):
    put(tmp_path / "ag_news", {"train.csv": news_csv("train", columns)})
    if is_packed:
        in_gzip(tmp_path / "ag_news" / "train.csv")

    texts, topics = small_news().load("train", tmp_path)

    assert texts == [f"{title} {description}" for _, title, description in ARTICLES["train"]]
    assert topics.tolist() == [2, 0, 1, 3]
    assert topics.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'"1","a"\n"5","b"\n', "has the class '5' and the text 'b' in line 2; classes are 1-4"),
        (b'"0","a"\n', "has the class '0'"),
        (b"Class Index,Title,Description\n", "has the class 'Class Index'"),
        (b'"1","a"\n"2"\n', "has 1 columns in line 2"),
        (b'"1","a","b"\n"2","c"\n', "has 2 columns in line 2"),
        (b'"1","a","b","c"\n', "has 4 columns in line 1"),
        (b'"1","a"\n\n"2","b"\n', "has 0 columns in line 2"),
        (b'"1","a"\n"2","b', "is no csv from line 2 on (unexpected end of data)"),
        (b'"1","a"\n"2","b"c"\n', "is no csv from line 2 on"),
        (b'"1"," "\n', "no text is empty"),
        (b'"1","a\xff"\n', "is no UTF-8 text"),
        (b'"1","' + b"a" * 200_000 + b'"\n', "is no csv from line 1 on (field larger"),
    ],
)
def test_a_damaged_csv_is_never_used(tmp_path, content, said):
    put(tmp_path / "ag_news", {"train.csv": content})

    message = refusal(small_news().load, "train", tmp_path)

    assert said in message
    assert str(tmp_path / "ag_news" / "train.csv") in message


@pytest.mark.parametrize("num_bytes", range(1, len(news_csv("test")) - 1, 3))
def test_a_csv_that_was_cut_is_noticed_wherever_it_was_cut(tmp_path, num_bytes):
    content = news_csv("test")
    put(tmp_path / "ag_news", {"test.csv": content[:num_bytes]})
    ends_with_a_row = content[:num_bytes].rstrip(b"\n") == content.split(b"\n")[0]

    if ends_with_a_row:  # then only a recorded sum can tell
        put(tmp_path / "ag_news", {SUMS_FILE: f"{sha256(content)}  test.csv\n".encode()})

    refusal(small_news().load, "test", tmp_path)


@pytest.mark.parametrize("is_packed", [False, True])
def test_roles_are_read_with_all_their_lines(tmp_path, is_packed):
    put(tmp_path / "shakespeare", {"roles.jsonl": roles_jsonl()})
    if is_packed:
        in_gzip(tmp_path / "shakespeare" / "roles.jsonl")

    roles = small_plays().load(tmp_path)

    assert [role._asdict() for role in roles] == ROLES


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (roles_jsonl()[:-20], "has no role in line 3"),
        (b"[1, 2]\n", "has no role in line 1"),
        (b"[" * 100_000, "has no role in line 1"),
        (b'{"play": "a", "role": "b"}\n', "has no role in line 1 (KeyError('speeches'))"),
        (roles_jsonl([{"play": 1, "role": "b", "speeches": ["c"]}]), "has a role in line 1 with"),
        (roles_jsonl([{"play": "a", "role": "b", "speeches": "c"}]), "has a role in line 1 with"),
        (roles_jsonl([{"play": "a", "role": "b", "speeches": []}]), "has a role in line 1 with"),
        (roles_jsonl([{"play": "a", "role": "b", "speeches": [7]}]), "has a role in line 1 with"),
        (b'{"play": "\xff"}\n', "is no UTF-8 text"),
    ],
)
def test_damaged_roles_are_never_used(tmp_path, content, said):
    put(tmp_path / "shakespeare", {"roles.jsonl": content})

    assert said in refusal(small_plays().load, tmp_path)
