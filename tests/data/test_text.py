import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.data import Vocabulary, next_word_windows, words_of
from fedbranch.data.text import END, NUMBER, UNKNOWN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Fears for T N pension", ["fears", "for", "t", "n", "pension"]),
        ("Google #39;s two-month-old rival", ["google", "'s", "two", "month", "old", "rival"]),
        ("don't; they&#39;ve", ["don", "'t", "they", "'ve"]),
        ("they say they are 'disappointed'", ["they", "say", "they", "are", "disappointed"]),
        ("quot;a real possibility quot;.", ["a", "real", "possibility"]),
        ("won 7,000 jobs and 27.3", ["won", NUMBER, "jobs", "and", NUMBER]),
        (r"for \$314 million\in cash", ["for", NUMBER, "million", "in", "cash"]),
        ("in the U.S. of A.", ["in", "the", "u.s.", "of", "a"]),
        ("Inc. &lt;TXN.N&gt;, &lt;b&gt;...&lt;/b&gt; said", ["inc", "said"]),
        ("<A HREF=http://x.com/y>IBM</A> up", ["ibm", "up"]),
        ("AT&amp;T; caf#233; #8212; over", ["at", "t", "café", "over"]),
        ("a #99999999; b #; c", ["a", NUMBER, "b", "c"]),
        ("", []),
    ],
)
def test_words_of_a_text(text, expected):
    assert words_of(text) == expected


@given(st.text(max_size=200))
def test_any_text_has_words_in_lower_case_without_spaces(text):
    for word in words_of(text):
        assert word
        assert word == word.strip()
        assert not any(character.isspace() for character in word)


def test_the_most_frequent_words_are_known_and_ties_go_by_the_alphabet():
    vocabulary = Vocabulary.of_texts(["b a c", "c d", "c"], size=4)

    assert vocabulary.words == ("c", "a")
    assert len(vocabulary) == 4


def test_a_vocabulary_is_no_larger_than_the_texts():
    assert len(Vocabulary.of_texts(["a b"], size=100)) == 4


def test_ids_and_names_are_inverse_but_for_unknown_words():
    vocabulary = Vocabulary.of_texts(["one two three"], size=10)
    words = ["three", END, "one", "four"]

    ids = vocabulary.ids(words)

    assert ids.dtype == np.int64
    assert vocabulary.named(ids) == ["three", END, "one", UNKNOWN]


def test_no_words_have_no_ids():
    assert Vocabulary(("a",)).ids([]).shape == (0,)


def test_a_word_that_is_there_twice_is_an_error():
    with pytest.raises(ValueError, match=r"\['a'\] are there twice"):
        Vocabulary(("a", "b", "a"))


def test_a_vocabulary_without_words_is_an_error():
    with pytest.raises(ValueError, match="size is 2; it must be at least 3"):
        Vocabulary.of_texts(["a"], size=2)


def test_targets_are_the_words_after_the_inputs_across_texts():
    vocabulary = Vocabulary(("a", "b", "c"))  # 2, 3, 4

    x, y = next_word_windows(["a b", "c", "x b"], vocabulary, length=2)

    assert x.tolist() == [[1, 2], [3, 1], [4, 1], [0, 3]]
    assert y.tolist() == [[2, 3], [1, 4], [1, 0], [3, 1]]


@pytest.mark.parametrize("length", [1, 3, 4])
def test_windows_are_the_whole_text_but_for_the_rest(length):
    texts = ["a b c", "b", "", "c c a b"]
    vocabulary = Vocabulary(("a", "b", "c"))

    x, y = next_word_windows(texts, vocabulary, length=length)

    stream = [1, 2, 3, 4, 1, 3, 1, 1, 4, 4, 2, 3, 1]
    num_used = (len(stream) - 1) // length * length
    assert x.ravel().tolist() == stream[:num_used]
    assert y.ravel().tolist() == stream[1 : num_used + 1]
    assert x.shape == y.shape == (num_used // length, length)


def test_too_few_words_for_a_window_are_an_error():
    with pytest.raises(ValueError, match=r"1 text.s. of 3 words in all do not fill a window of 4"):
        next_word_windows(["a b"], Vocabulary(("a", "b")), length=4)


def test_windows_without_words_are_an_error():
    with pytest.raises(ValueError, match="length is 0"):
        next_word_windows(["a b"], Vocabulary(("a", "b")), length=0)
