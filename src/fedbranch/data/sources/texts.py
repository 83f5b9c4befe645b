"""Texts: AG-News (csv) and Shakespeare's plays by role (a JSON object for each role)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fedbranch.data.sources.downloads import mirrored
from fedbranch.data.sources.files import Counts, PartOfSet, Source, check_part

__all__ = [
    "AG_NEWS",
    "AG_NEWS_TOPICS",
    "SHAKESPEARE",
    "Articles",
    "NewsTexts",
    "Role",
    "RoleTexts",
    "ag_news",
    "shakespeare",
]

AG_NEWS_TOPICS = ("World", "Sports", "Business", "Sci/Tech")


class Articles(NamedTuple):
    """News articles: title and description in one text, and the topic of each."""

    texts: list[str]
    topics: NDArray[np.int64]  # positions in AG_NEWS_TOPICS


class Role(NamedTuple):
    """The speeches of one speaking role of a play."""

    play: str
    role: str
    speeches: list[str]


def ag_news(part: PartOfSet = "train", data_dir: str | Path | None = None) -> Articles:
    """Read AG-News: short news articles on four topics.

    Parameters
    ----------
    part
        ``"train"`` or ``"test"``.
    data_dir
        The data folder, which has ``train.csv`` and ``test.csv`` in ``ag_news/``, plain or
        ``.gz``; by default :func:`default_data_dir`. A row is a class, 1-4, a title and a
        description, which become one text. A class and a text are read as well.

    Raises
    ------
    MissingData
        If the file is missing; the message names it and how to get it.
    DamagedFile
        If a file cannot be read to its end, or has changed since it was fetched.
    """
    return AG_NEWS.load(part, data_dir)


def shakespeare(data_dir: str | Path | None = None) -> list[Role]:
    """Read Shakespeare's plays by speaking role.

    Parameters
    ----------
    data_dir
        The data folder, which has ``roles.jsonl`` in ``shakespeare/``, plain or ``.gz``; by
        default :func:`default_data_dir`. Each line is a JSON object with ``play``, ``role``
        and the list ``speeches``.

    Raises
    ------
    MissingData
        If the file is missing.
    DamagedFile
        If it cannot be read to its end.
    """
    return SHAKESPEARE.load(data_dir)


@dataclass(frozen=True, kw_only=True)
class NewsTexts(Source):
    """Articles as rows of csv."""

    topics: tuple[str, ...]

    def load(self, part: PartOfSet, data_dir: str | Path | None = None) -> Articles:
        """Read a part; see :func:`ag_news`."""
        check_part(part)
        (file_name,) = self.parts[part]
        path = self.path(file_name, data_dir)
        content = self.read(path)
        self.check_sum(path, content)
        classes = {str(i): i - 1 for i in range(1, len(self.topics) + 1)}
        texts: list[str] = []
        topics: list[int] = []
        num_columns = 0
        rows = csv.reader(_lines(self, path, content), strict=True)
        try:
            for row in rows:
                num_columns = num_columns or len(row)
                if len(row) != num_columns or num_columns not in (2, 3):
                    raise self.damaged(
                        path,
                        f"has {len(row)} columns in line {rows.line_num}; all rows have a class and "
                        "a text, or a class, a title and a description",
                    )
                topic, text = row[0], " ".join(row[1:])
                if topic not in classes or not text.strip():
                    raise self.damaged(
                        path,
                        f"has the class {topic!r} and the text {text[:20]!r} in line "
                        f"{rows.line_num}; classes are 1-{len(self.topics)}, and no text is empty",
                    )
                texts.append(text)
                topics.append(classes[topic])
        except csv.Error as error:
            raise self.damaged(
                path, f"is no csv from line {rows.line_num} on ({error}); perhaps it was cut"
            ) from error
        if not texts:
            raise self.damaged(path, "is empty")
        return Articles(texts=texts, topics=np.array(topics, np.int64))

    def count(self, part: str, data_dir: str | Path | None = None) -> Counts:
        """Read a part, check it, and count its articles and topics."""
        topics = self.load(cast("PartOfSet", part), data_dir).topics
        return Counts(rows=len(topics), classes=len(np.unique(topics)))


@dataclass(frozen=True, kw_only=True)
class RoleTexts(Source):
    """Roles as lines of JSON."""

    def load(self, data_dir: str | Path | None = None) -> list[Role]:
        """Read all roles; see :func:`shakespeare`."""
        path = self.path(self.file_names[0], data_dir)
        content = self.read(path)
        self.check_sum(path, content)
        roles = []
        for number, line in enumerate(_lines(self, path, content), start=1):
            try:
                entry = json.loads(line)
                role = Role(entry["play"], entry["role"], entry["speeches"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise self.damaged(path, f"has no role in line {number} ({error!r})") from error
            is_text = isinstance(role.play, str) and isinstance(role.role, str)
            says = role.speeches
            if not is_text or not isinstance(says, list) or not says or not _are_texts(says):
                raise self.damaged(
                    path,
                    f"has a role in line {number} with a play or role that is no text, or with "
                    "speeches that are no list of texts",
                )
            roles.append(role)
        if not roles:
            raise self.damaged(path, "is empty")
        return roles

    def count(self, part: str, data_dir: str | Path | None = None) -> Counts:  # noqa: ARG002 - there is one part
        """Read all roles, check them, and count them and their plays."""
        roles = self.load(data_dir)
        return Counts(rows=len(roles), classes=len({role.play for role in roles}))


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _lines(source: Source, path: Path, content: bytes) -> list[str]:
    """Cut a text at line feeds only: texts contain other characters where splitlines cuts."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise source.damaged(path, f"is no UTF-8 text: {error}") from error
    return io.StringIO(text, newline="\n").readlines()


AG_NEWS = NewsTexts(
    name="ag_news",
    title="AG-News",
    folders=("ag_news",),
    parts={"train": ("train.csv",), "test": ("test.csv",)},
    published_rows={"train": 120_000, "test": 7_600},
    topics=AG_NEWS_TOPICS,
    words=("articles", "topics"),
    # No sums of unpacked files: a set with fewer articles is read as well.
    downloads=mirrored(
        {
            "train.csv": "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
            "test.csv": "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
        },
        "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",
        "https://raw.githubusercontent.com/mhjabreel/CharCNN/master/data/ag_news_csv/",
    ),
)

SHAKESPEARE = RoleTexts(
    name="shakespeare",
    title="Shakespeare by role",
    folders=("shakespeare",),
    parts={"all": ("roles.jsonl",)},
    words=("roles", "plays"),
)
