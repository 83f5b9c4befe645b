"""Text from outside is short, printable, and the same in every run."""

import pytest

from fedbranch.protocol.plain_text import one_line, shortened


class Unshowable:
    def __repr__(self):
        raise KeyError("no representation")


def test_a_value_from_outside_is_described_briefly_and_the_same_every_time():
    assert shortened([0.5] * 10**6) == "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]"
    assert shortened(object()) == shortened(object()) == "<object object>"
    assert len(one_line("x" * 10**6)) == 300


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**500, list(range(10**5)), {i: i for i in range(999)}]
)
def test_a_large_value_is_described_in_80_characters(value):
    assert len(shortened(value)) <= 80


def test_a_value_without_a_representation_is_described_by_its_type():
    for value in (10**5000, Unshowable()):
        described = shortened(value)

        assert type(value).__name__ in described
        assert len(described) <= 80


def test_a_line_has_no_characters_that_control_a_terminal():
    line = one_line("a\n\tb\x1b[2J\x07\u202ec")

    assert line == "a b?[2J??c"
    assert line.isprintable()


@pytest.mark.parametrize(
    ("length", "longest", "ends"), [(10, 10, "x"), (11, 10, "..."), (10**6, 10, "...")]
)
def test_a_longer_text_is_cut_and_shows_it(length, longest, ends):
    line = one_line("x" * length, longest)

    assert len(line) == min(length, longest)
    assert line.endswith(ends)
