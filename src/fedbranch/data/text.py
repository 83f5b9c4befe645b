"""Texts as numbers: words, a vocabulary of frequent words, and windows of word numbers."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedbranch.data.examples import Examples

__all__ = ["END", "NUMBER", "UNKNOWN", "Vocabulary", "next_word_windows", "words_of"]

UNKNOWN = "<unknown>"
END = "<end>"
NUMBER = "<number>"

# Characters written by name. Some programs drop the "&", so it is optional.
_CHARACTER = re.compile(r"&?(#\d{1,5}|#x[0-9a-f]{1,4}|quot|apos|nbsp|lt|gt|amp);", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")
_WORD = re.compile(
    r"(?P<number>\d+(?:[.,]\d+)*)"
    r"|(?:[^\W\d_]\.){2,}"  # u.s.
    r"|(?<=[^\W\d_])\s?'(?:s|t|d|m|re|ve|ll)\b"  # google's, don't
    r"|[^\W\d_]+"
)


def words_of(text: str) -> list[str]:
    """Cut a text into words, in lower case and without punctuation.

    A word is a run of letters, an abbreviation with dots (``u.s.``) or an ending behind an
    apostrophe (``'s``). Every number is the same word, :data:`NUMBER`. Characters written by
    name, with or without the ``&`` (``#39;``, ``quot;``), are decoded. Then text in angle
    brackets (tags of HTML, names of shares) is dropped.

    Examples
    --------
    >>> words_of("Google #39;s rival earns &lt;b&gt;$1,000.50&lt;/b&gt; in the U.S.")
    ['google', "'s", 'rival', 'earns', '<number>', 'in', 'the', 'u.s.']
    """
    plain = _CHARACTER.sub(lambda found: html.unescape(f"&{found[1].lower()};"), text)
    plain = _TAG.sub(" ", plain).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lower()
    return [NUMBER if found["number"] else found[0].strip() for found in _WORD.finditer(plain)]


@dataclass(frozen=True)
class Vocabulary:
    """Numbers of words: 0 is any unknown word, 1 the end of a text, then the given words.

    Parameters
    ----------
    words
        The known words. The first has number 2.

    Examples
    --------
    >>> vocabulary = Vocabulary.of_texts(["a rose is a rose", "is it"], size=5)
    >>> vocabulary.words
    ('a', 'is', 'rose')
    >>> vocabulary.ids(["it", "is", "a", "rose"])
    array([0, 3, 2, 4])
    """

    words: tuple[str, ...]
    _id_of: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        names = [UNKNOWN, END, *self.words]
        id_of = {name: number for number, name in enumerate(names)}
        if len(id_of) < len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(f"the words {twice[:5]} are there twice; pass every word once")
        object.__setattr__(self, "_id_of", id_of)

    @classmethod
    def of_texts(cls, texts: Iterable[str], *, size: int) -> Vocabulary:
        """Make a vocabulary of the most frequent words of texts.

        Parameters
        ----------
        texts
            Each is cut by :func:`words_of`.
        size
            Number of words, with the unknown word and the end. Texts with fewer different
            words give a smaller vocabulary. Of equally frequent words the first in the
            alphabet is taken.
        """
        if size < 3:
            raise ValueError(
                f"size is {size}; it must be at least 3: the unknown word, the end, and a word"
            )
        counts = Counter(word for text in texts for word in words_of(text))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(tuple(ordered[: size - 2]))

    def __len__(self) -> int:
        """Count the words, with the unknown word and the end."""
        return 2 + len(self.words)

    def ids(self, words: Iterable[str]) -> NDArray[np.int64]:
        """Return the numbers of words; an unknown word has 0."""
        return np.array([self._id_of.get(word, 0) for word in words], dtype=np.int64)

    def named(self, ids: Iterable[int]) -> list[str]:
        """Return the words with these numbers."""
        names = (UNKNOWN, END, *self.words)
        return [names[number] for number in ids]


def next_word_windows(texts: Sequence[str], vocabulary: Vocabulary, *, length: int) -> Examples:
    """Make examples from texts, to predict every next word.

    The texts are joined, with an end before, between and after them, and cut into windows of
    the same length, so that none needs padding. Words behind the last window are dropped.
    Inputs are words, targets the words after them: both of shape (num_windows, length).

    Parameters
    ----------
    texts
        Each is cut by :func:`words_of`.
    vocabulary
        Numbers of the words.
    length
        Words in a window.

    Examples
    --------
    >>> vocabulary = Vocabulary.of_texts(["a rose is a rose"], size=5)
    >>> next_word_windows(["a rose", "is a rose"], vocabulary, length=3).x.tolist()
    [[1, 2, 3], [1, 4, 2]]
    >>> next_word_windows(["a rose", "is a rose"], vocabulary, length=3).y.tolist()
    [[2, 3, 1], [4, 2, 3]]
    """
    if length < 1:
        raise ValueError(f"length is {length}; a window has at least one word")
    end = vocabulary.ids([END])
    parts = [end]
    for text in texts:
        parts += [vocabulary.ids(words_of(text)), end]
    stream = np.concatenate(parts)
    num_windows = (len(stream) - 1) // length
    if num_windows == 0:
        raise ValueError(
            f"{len(texts)} text(s) of {len(stream) - 1} words in all do not fill a window of "
            f"{length} words; pass more texts or a smaller length"
        )
    shape = (num_windows, length)
    num_used = num_windows * length
    return Examples(x=stream[:num_used].reshape(shape), y=stream[1 : num_used + 1].reshape(shape))
